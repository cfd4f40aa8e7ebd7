"""Tests of a server that sleeps and is paused under traffic, controlled through either of two API
processes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from preloaded import Preloaded
from safetensors.torch import load_file, save_file
from serve_process import SHARED_FLAGS, ServeProcess, eventually, joined
from tiny_text import TextModel

from quire.server import main
from quire.server.app import Application
from quire.server.settings import make_settings

WAKING_S = 120.0
STARTING_S = 300.0
LENGTH = 300
"""Number of tokens of an answer that still runs when the next call arrives."""
FLAGS = (
    *("--enable-sleep-mode", "--api-server-count", "2"),
    *("--weight-transfer-config", '{"backend": "file"}'),
)


@pytest.fixture(scope="module")
def server(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("operate") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        started = ServeProcess(str(tiny.path), *SHARED_FLAGS, *FLAGS, log=log, preloaded=preloaded)
    with started:
        eventually("the server is up", lambda: started.health() == 200, STARTING_S)
        started.until_healthy(num_api=2)
        yield started
        started.end_cleanly()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture(autouse=True)
def check_idle_after_test(server: ServeProcess) -> Iterator[None]:
    yield
    assert server.health() == 200
    eventually("no request is left", lambda: at_rest(server))


def at_rest(server: ServeProcess) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    metrics = server.metrics()
    return not any(metrics[name] for name in names) and is_in(server, "awake")


def is_in(server: ServeProcess, state: str) -> bool:
    return server.metrics()[f"engine_sleep_state:{state}"] == 1


def post(server: ServeProcess, path: str, **kwargs: Any) -> Any:
    reply = server.client.post(path, timeout=WAKING_S, **kwargs)
    assert reply.status_code == 200, reply.text
    return reply.json() if reply.content else None


def everywhere(server: ServeProcess, path: str, expected: dict[str, bool]) -> bool:
    """Return whether every API process gives this answer: each connection is to another process."""
    return all(httpx.get(server.url + path, timeout=WAKING_S).json() == expected for _ in range(4))


def submit_waiting(server: ServeProcess, pool: ThreadPoolExecutor, **body: Any) -> "Future[dict[str, Any]]":
    """Submit a request that stays in the queue."""
    before = server.metrics()["num_requests_waiting"]
    future = pool.submit(server.complete, **body)
    eventually("the request waits", lambda: server.metrics()["num_requests_waiting"] > before)
    assert not future.done()
    return future


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_under_traffic_keeps_the_answers(
    server: ServeProcess, pool: ThreadPoolExecutor, level: int
) -> None:
    """Streams that are kept continue where they stopped, new requests wait, and health checks never fail."""
    whole = server.complete(max_tokens=LENGTH)["choices"][0]["text"]
    pair = {"prompt": ["The quick", "The quick"], "max_tokens": LENGTH}
    with server.streaming(max_tokens=LENGTH) as stream, server.streaming(**pair) as others:
        stream_events, of_others = [next(stream)], [next(others)]
        post(server, f"/sleep?level={level}&mode=keep")
        assert everywhere(server, "/is_sleeping", {"is_sleeping": True})
        state = ("weights_offloaded", "discard_all")[level - 1]
        eventually("the first token is streamed", lambda: is_in(server, state))
        post(server, f"/sleep?level={level}")  # a second call changes nothing: kept requests stay
        late = submit_waiting(server, pool, max_tokens=LENGTH)
        assert server.health() == 200
        post(server, "/wake_up?tags=weights")
        assert everywhere(server, "/is_sleeping", {"is_sleeping": True}) and not late.done()
        post(server, "/wake_up?tags=kv_cache")
        assert everywhere(server, "/is_sleeping", {"is_sleeping": False})
        stream_events += stream
        of_others += others
    assert joined(stream_events) == whole and stream_events[-1] == "[DONE]"
    for index in range(2):
        choices = [
            event for event in of_others if isinstance(event, dict) and event["choices"][0]["index"] == index
        ]
        assert joined(choices) == whole
    assert late.result(WAKING_S)["choices"][0]["text"] == whole
    post(server, "/wake_up")


def test_sleep_aborts_running_requests_by_default(server: ServeProcess) -> None:
    with server.streaming(max_tokens=8000) as stream:
        stream_events = [next(stream)]
        post(server, "/sleep")
        stream_events += stream
    post(server, "/wake_up")
    assert stream_events[-1] == "[DONE]" and isinstance(stream_events[-2], dict)
    assert stream_events[-2]["choices"][0]["finish_reason"] == "abort"


def test_pause_modes_keep_wait_and_abort(server: ServeProcess, pool: ThreadPoolExecutor) -> None:
    whole = server.complete(max_tokens=LENGTH)["choices"][0]["text"]
    with server.streaming(max_tokens=LENGTH) as stream:
        stream_events = [next(stream)]
        post(server, "/pause?mode=keep")
        assert everywhere(server, "/is_paused", {"is_paused": True})
        late = submit_waiting(server, pool, max_tokens=LENGTH)
        post(server, "/resume")
        assert everywhere(server, "/is_paused", {"is_paused": False})
        stream_events += stream
    assert joined(stream_events) == whole and late.result(WAKING_S)["choices"][0]["text"] == whole
    with server.streaming(max_tokens=LENGTH) as stream:
        stream_events = [next(stream)]
        post(server, "/pause?mode=wait")
        stream_events += stream
    assert joined(stream_events) == whole
    late = submit_waiting(server, pool, max_tokens=LENGTH)
    post(server, "/pause?mode=abort")  # waiting requests are aborted, too
    assert late.result(WAKING_S)["choices"][0]["finish_reason"] == "abort"
    post(server, "/resume")


def test_requests_of_any_api_process_are_aborted_by_id(server: ServeProcess) -> None:
    with server.streaming(max_tokens=8000, prompt=["The quick", "brown fox"]) as stream:
        first = next(stream)
        assert isinstance(first, dict)
        body = {"request_ids": [first["id"], "no-such"]}
        assert post(server, "/abort_requests", json=body) == {"status": "aborted", "aborted": 2}
        stream_events = [event for event in stream if isinstance(event, dict)]
    assert [event["choices"][0]["finish_reason"] for event in stream_events][-2:] == ["abort", "abort"]


def test_collective_rpc_survives_failing_calls(server: ServeProcess) -> None:
    results = post(server, "/collective_rpc", json={"method": "memory_stats"})["results"]
    assert len(results) == 1 and results[0]["weights"] > 0
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


def versions(server: ServeProcess) -> set[str]:
    """Return the versions that the API processes put into their answers."""
    replies = [httpx.get(server.url + "/v1/models", timeout=WAKING_S) for _ in range(4)]
    return {reply.headers["x-weight-version"] for reply in replies}


def update_weights(server: ServeProcess, path: Path, version: str) -> None:
    post(server, "/start_weight_update", json={"is_checkpoint_format": True})
    post(server, "/update_weights", json={"update_info": {"path": str(path)}})
    post(server, "/finish_weight_update", json={"weight_version": version})


def test_weights_change_under_traffic(server: ServeProcess, tiny: TextModel, tmp_path: Path) -> None:
    """Catches a stream that ends, tokens of old weights after an update, and an old version in answers."""
    weights = load_file(tiny.path / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    old = server.complete(max_tokens=2 * LENGTH)["choices"][0]["text"]
    assert post(server, "/init_weight_transfer_engine", json={"init_info": {}})
    assert versions(server) == {"default"}
    with server.streaming(max_tokens=2 * LENGTH) as stream:
        stream_events = [next(stream)]
        update_weights(server, tmp_path, "step-1")
        stream_events += stream
    assert stream_events[-1] == "[DONE]" and joined(stream_events) != old
    eventually("both API processes know the version", lambda: versions(server) == {"step-1"})
    assert server.client.get("/weight_info").json() == {"weight_version": "step-1"}
    assert server.client.get("/server_info").json()["weight_version"] == "step-1"
    assert 'weight_version="step-1"' in server.client.get("/metrics").text
    new = server.complete(max_tokens=20)["choices"][0]["text"]
    assert not old.startswith(new)
    post(server, "/start_weight_update")
    wrong = {"update_info": {"path": str(tmp_path / "none")}}
    assert server.client.post("/update_weights", json=wrong).status_code == 400
    assert server.client.post("/finish_weight_update").status_code == 400
    assert server.complete(max_tokens=20)["choices"][0]["text"] == new
    update_weights(server, tiny.path, "default")
    assert old.startswith(server.complete(max_tokens=20)["choices"][0]["text"])


def test_routes_are_logged_at_debug_level_only(server: ServeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Route: " not in server.text()
    lines: list[str] = []
    monkeypatch.setattr(main.logger, "debug", lambda text, *args: lines.append(text % args))
    main._announce(make_settings({}), [Application(FakeEngine("Hi"), make_settings({}))])
    assert "Route: /v1/chat/completions, Methods: POST" in lines
