"""Tests of API keys on a server with two API processes: a flood of requests, answers meanwhile, limits,
counters, disconnects."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from preloaded import Preloaded
from serve_process import PATIENCE_S, SHARED_FLAGS, ServeProcess, eventually, greedy
from tiny_text import TextModel

KEYS = [
    {"name": "greedy", "key": "sk-greedy"},
    {"name": "light", "key": "sk-light"},
    {"name": "single", "key": "sk-single", "max_concurrency": 1},
    {"name": "poor", "key": "sk-poor", "tokens_per_minute": 20},
]


ENDLESS: dict[str, Any] = {"prompt": [[number + 5] * 9 for number in range(48)], "max_tokens": 8000}
"""The body of one request that takes some hundred thousand steps."""


@pytest.fixture(scope="module")
def keyed(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys.json").write_text(json.dumps({"keys": KEYS}))
    flags = ("--max-num-seqs", "4", "--api-server-count", "2", "--api-key", str(folder / "keys.json"))
    with ServeProcess(
        str(tiny.path), *SHARED_FLAGS, *flags, log=folder / "log", preloaded=preloaded
    ) as started:
        started.until_healthy(num_api=2)
        yield started
        started.end_cleanly()
        assert "sk-" not in started.text()


def post(server: ServeProcess, key: str, **body: Any) -> httpx.Response:
    """Send a request on a new connection, so that any of the API processes may answer."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh:
        return fresh.post(
            "/v1/completions", json=greedy(**body), headers={"authorization": f"Bearer sk-{key}"}
        )


def running(server: ServeProcess, key: str) -> float:
    return server.metrics()[f"quire:key_running:{key}"]


def open_stream(stack: ExitStack, server: ServeProcess, key: str, **body: Any) -> httpx.Response:
    client = stack.enter_context(httpx.Client(base_url=server.url, timeout=PATIENCE_S))
    headers = {"authorization": f"Bearer sk-{key}"}
    body_sent = greedy(stream=True, **body)
    return stack.enter_context(client.stream("POST", "/v1/completions", json=body_sent, headers=headers))


def test_flood_of_one_key_does_not_delay_other_keys(keyed: ServeProcess) -> None:
    """All four rows are taken by answers of 8,000 tokens, and many more wait."""
    with ExitStack() as stack:
        open_stream(stack, keyed, "greedy", **ENDLESS)
        eventually("rows are taken", lambda: keyed.metrics()["num_requests_running"] == 4)
        assert running(keyed, "greedy") == 1
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda _: post(keyed, "light", max_tokens=5), range(6)))
        assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [5] * 6
        assert keyed.metrics()["num_requests_waiting"] > 0, "answered when the queue was empty"
    eventually("disconnected clients are gone", lambda: running(keyed, "greedy") == 0)
    eventually("and so are their rows", lambda: keyed.metrics()["num_requests_running"] == 0)
    seen = keyed.metrics()
    prompt = replies[0].json()["usage"]["prompt_tokens"]
    counted = [
        seen[f"quire:key_{what}_total:light"] for what in ("requests", "prompt_tokens", "generation_tokens")
    ]
    assert counted == [6, 6 * prompt, 30] and seen["quire:key_requests_total:greedy"] == 1
    assert seen["num_preemptions_total"] >= 1 and seen["quire:key_running:light"] == 0


def test_processes_share_the_concurrency_limit(keyed: ServeProcess) -> None:
    before = keyed.metrics()["quire:key_rejected_total:single:concurrency"]
    with ExitStack() as stack:
        open_stream(stack, keyed, "single", **ENDLESS)
        eventually("the request runs", lambda: running(keyed, "single") == 1)
        replies = [post(keyed, "single", max_tokens=1) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [429] * 4
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        assert replies[0].json()["error"]["type"] == "RateLimitError"
    eventually("its slot is free", lambda: running(keyed, "single") == 0)
    assert post(keyed, "single", max_tokens=1).status_code == 200
    assert keyed.metrics()["quire:key_rejected_total:single:concurrency"] == before + 4


def test_processes_share_the_token_limit(keyed: ServeProcess) -> None:
    assert post(keyed, "poor", prompt=[5] * 2000, max_tokens=1).status_code == 200
    replies = [post(keyed, "poor", max_tokens=1) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [429] * 4
    assert int(replies[0].headers["retry-after"]) > 60 and "tokens_per_minute is 20" in replies[0].text
    assert keyed.metrics()["quire:key_rejected_total:poor:tokens"] == 4


def test_missing_key_is_401(keyed: ServeProcess) -> None:
    assert post(keyed, "nobody").status_code == 401
    assert (
        keyed.client.get("/v1/models").status_code == 401 and keyed.client.get("/health").status_code == 200
    )
