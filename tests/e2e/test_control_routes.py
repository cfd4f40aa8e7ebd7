"""A server put to sleep and paused under traffic, by either of two API processes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from preloaded import Preloaded
from serve_process import SHARED_FLAGS, ServeProcess, eventually, joined
from tiny_text import TextModel

from quire.server import main
from quire.server.app import Application
from quire.server.settings import make_settings

WAKING_S = 120.0
STARTING_S = 300.0
FLAGS = ("--enable-sleep-mode", "--api-server-count", "2")


@pytest.fixture(scope="module")
def server(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("operate") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        started = ServeProcess(str(tiny.path), *SHARED_FLAGS, *FLAGS, log=log, preloaded=preloaded)
    with started:
        eventually("it is up", lambda: started.health() == 200, STARTING_S)
        started.until_healthy(num_api=2)
        yield started
        started.end_cleanly()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture(autouse=True)
def leaves_it_as_it_was(server: ServeProcess) -> Iterator[None]:
    yield
    assert server.health() == 200
    eventually("nothing is left", lambda: at_rest(server))


def at_rest(server: ServeProcess) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = server.metrics()
    return not any(found[name] for name in names) and is_in(server, "awake")


def is_in(server: ServeProcess, state: str) -> bool:
    return server.metrics()[f"engine_sleep_state:{state}"] == 1


def post(server: ServeProcess, path: str, **given: Any) -> Any:
    reply = server.client.post(path, timeout=WAKING_S, **given)
    assert reply.status_code == 200, reply.text
    return reply.json() if reply.content else None


def everywhere(server: ServeProcess, path: str, expected: dict[str, bool]) -> bool:
    """Whichever process is asked: each connection goes to another."""
    return all(httpx.get(server.url + path, timeout=WAKING_S).json() == expected for _ in range(4))


def waiting(server: ServeProcess, pool: ThreadPoolExecutor, **body: Any) -> "Future[dict[str, Any]]":
    """A request that is not answered for now."""
    before = server.metrics()["num_requests_waiting"]
    future = pool.submit(server.complete, **body)
    eventually("it waits", lambda: server.metrics()["num_requests_waiting"] > before)
    assert not future.done()
    return future


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_under_traffic_and_the_same_answers_after(
    server: ServeProcess, pool: ThreadPoolExecutor, level: int
) -> None:
    """Kept streams go on where they were; who comes meanwhile waits; a health check never fails."""
    whole = server.complete(max_tokens=600)["choices"][0]["text"]
    pair = {"prompt": ["The quick", "The quick"], "max_tokens": 600}
    with server.streaming(max_tokens=600) as stream, server.streaming(**pair) as others:
        found, of_others = [next(stream)], [next(others)]
        post(server, f"/sleep?level={level}&mode=keep")
        assert everywhere(server, "/is_sleeping", {"is_sleeping": True})
        state = ("weights_offloaded", "discard_all")[level - 1]
        eventually("it is shown", lambda: is_in(server, state))
        post(server, f"/sleep?level={level}")  # twice is once: what is kept stays
        late = waiting(server, pool, max_tokens=600)
        assert server.health() == 200
        post(server, "/wake_up?tags=weights")
        assert everywhere(server, "/is_sleeping", {"is_sleeping": True}) and not late.done()
        post(server, "/wake_up?tags=kv_cache")
        assert everywhere(server, "/is_sleeping", {"is_sleeping": False})
        found += stream
        of_others += others
    assert joined(found) == whole and found[-1] == "[DONE]"
    for index in range(2):
        mine = [each for each in of_others if isinstance(each, dict) and each["choices"][0]["index"] == index]
        assert joined(mine) == whole
    assert late.result(WAKING_S)["choices"][0]["text"] == whole
    post(server, "/wake_up")


def test_sleep_ends_what_runs_unless_told_otherwise(server: ServeProcess) -> None:
    with server.streaming(max_tokens=8000) as stream:
        found = [next(stream)]
        post(server, "/sleep")
        found += stream
    post(server, "/wake_up")
    assert found[-1] == "[DONE]" and isinstance(found[-2], dict)
    assert found[-2]["choices"][0]["finish_reason"] == "abort"


def test_pause_keeps_waits_or_ends(server: ServeProcess, pool: ThreadPoolExecutor) -> None:
    whole = server.complete(max_tokens=300)["choices"][0]["text"]
    with server.streaming(max_tokens=300) as stream:
        found = [next(stream)]
        post(server, "/pause?mode=keep")
        assert everywhere(server, "/is_paused", {"is_paused": True})
        late = waiting(server, pool, max_tokens=300)
        post(server, "/resume")
        assert everywhere(server, "/is_paused", {"is_paused": False})
        found += stream
    assert joined(found) == whole and late.result(WAKING_S)["choices"][0]["text"] == whole
    with server.streaming(max_tokens=300) as stream:
        found = [next(stream)]
        post(server, "/pause?mode=wait")
        found += stream
    assert joined(found) == whole
    late = waiting(server, pool, max_tokens=300)
    post(server, "/pause?mode=abort")  # those who wait end, too
    assert late.result(WAKING_S)["choices"][0]["finish_reason"] == "abort"
    post(server, "/resume")


def test_requests_end_by_their_ids_whoever_answers_them(server: ServeProcess) -> None:
    with server.streaming(max_tokens=8000, prompt=["The quick", "brown fox"]) as stream:
        first = next(stream)
        assert isinstance(first, dict)
        body = {"request_ids": [first["id"], "no-such"]}
        assert post(server, "/abort_requests", json=body) == {"aborted": 2}
        found = [each for each in stream if isinstance(each, dict)]
    assert [each["choices"][0]["finish_reason"] for each in found][-2:] == ["abort", "abort"]


def test_workers_are_asked_and_survive_what_cannot_be_answered(server: ServeProcess) -> None:
    found = post(server, "/collective_rpc", json={"method": "memory_stats"})["results"]
    assert len(found) == 1 and found[0]["weights"] > 0
    assert post(server, "/collective_rpc", json={"method": "check_health"}) == {"results": [None]}
    for body in (
        {"method": "no_such"},
        {"method": "__class__"},
        {"method": "_bind", "args": [1]},
        {"method": "close"},
        {"method": "submit", "args": [None]},
        {"method": "model"},
        {"method": "memory_stats", "args": [1] * 1000},
        {"method": "memory_stats", "args": [10**30]},
        {"method": "memory_stats", "kwargs": {"x": [[[[{}]]]]}},
        {"method": "é\u0000"},
    ):
        assert server.client.post("/collective_rpc", json=body).status_code == 400, body
    for path, raw in (
        ("/collective_rpc", rb'{"method": "\ud800"}'),
        ("/collective_rpc", rb'{"method": "memory_stats", "args": ["\ud800"]}'),
        ("/abort_requests", rb'{"request_ids": ["\ud800"]}'),
        ("/collective_rpc", b'{"method": "memory_stats", "args": ' + b"[" * 900 + b"]" * 900 + b"}"),
        ("/abort_requests", b"\xff"),
    ):
        reply = server.client.post(path, content=raw, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (path, raw[:50], reply.text)
    for path in ("/sleep?level=7", "/wake_up?tags=x", "/pause?mode=x", "/sleep?mode=x"):
        assert server.client.post(path).status_code == 400, path
    info = server.client.get("/server_info?config_format=json").json()
    assert info["vllm_config"]["parallel"]["data_parallel_size"] == 1
    assert server.client.get("/get_world_size").json() == {"world_size": 1}
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_the_log_lists_the_routes_at_debug_level_only(
    server: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Route: " not in server.text()
    lines: list[str] = []
    monkeypatch.setattr(main.logger, "debug", lambda text, *args: lines.append(text % args))
    main._log_routes(Application(FakeEngine("Hi"), make_settings({})))
    assert "Route: /v1/chat/completions, Methods: POST" in lines
