"""Tests of a server with two ranks: one is killed, one stopped, the core killed; no process is left and
nothing hangs."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from preloaded import Preloaded
from serve_process import SHARED_FLAGS, ServeProcess, eventually, joined
from tiny_text import TextModel

HEALTH_TIMEOUT_S = 10.0
"""Seconds, longer than a busy machine delays the next step of a rank."""
LENGTH = 80
"""Number of tokens of the compared answers. With two ranks, a token takes 20 ms of CPU."""


@pytest.fixture(scope="module")
def pair(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("pair") / "log"
    flags = ("-tp", "2", "--health-timeout", str(HEALTH_TIMEOUT_S))
    with ServeProcess(str(tiny.path), *SHARED_FLAGS, *flags, log=log, preloaded=preloaded) as started:
        started.until_healthy()
        yield started
        started.end_cleanly()


def ranks(server: ServeProcess) -> list[int]:
    return server.with_role("Worker_TP")


def at_rest(server: ServeProcess) -> bool:
    if server.health() != 200 or len(ranks(server)) != 2:
        return False
    metrics = server.metrics()
    return metrics["num_requests_running"] == 0 == metrics["kv_cache_usage_perc"]


def test_stopped_rank_is_unhealthy_and_resumes(pair: ServeProcess) -> None:
    """Catches a core that reports nothing while it waits for a rank, and a stream lost over a pause."""
    expected = pair.complete(max_tokens=LENGTH)["choices"][0]["text"]
    _, second = ranks(pair)
    with pair.streaming(max_tokens=5 * LENGTH) as stream:  # it has not ended when the rank is stopped
        stream_events = [next(stream)]
        os.kill(second, signal.SIGSTOP)
        try:
            eventually("the server is unhealthy", lambda: pair.health() == 503)
            refused = pair.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert "no progress" in refused.json()["error"]["message"]
        finally:
            os.kill(second, signal.SIGCONT)
        while len(joined(stream_events)) < len(expected):
            stream_events.append(next(stream))
    assert joined(stream_events).startswith(expected)
    eventually("the server is healthy again", lambda: at_rest(pair))


@pytest.mark.parametrize("victim", ["rank", "core"])
def test_killed_process_ends_the_engine_and_it_restarts(pair: ServeProcess, victim: str) -> None:
    """Catches orphans, a stream that hangs or ends, and an engine that is not restarted."""
    whole = pair.complete(max_tokens=LENGTH)["choices"][0]["text"]
    before, core = ranks(pair), pair.core
    with pair.streaming(max_tokens=LENGTH) as stream:
        stream_events = [next(stream)]
        os.kill(before[1] if victim == "rank" else core, signal.SIGKILL)
        eventually("all ranks end", lambda: not {core, *before} & {*psutil.pids()})
        stream_events += stream
    assert stream_events[-1] == "[DONE]" and joined(stream_events) == whole
    eventually("the engine is back", lambda: at_rest(pair))
    assert pair.core != core and not set(ranks(pair)) & set(before)
    assert pair.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    if victim == "rank":
        assert "Worker_TP1 is gone" in pair.text() or "Worker_TP0 is gone" in pair.text()
