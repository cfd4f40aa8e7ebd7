"""Tests of processes that are killed or stopped in a running server: correct health, clear errors, and
recovery."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from preloaded import Preloaded
from serve_process import SHARED_FLAGS, ServeProcess, Start, eventually, joined
from tiny_text import TextModel

HEALTH_TIMEOUT_S = 10.0
"""Seconds, longer than a busy machine delays the next step of a core."""
LENGTH = 500
"""Number of tokens of an answer that still runs when a process is killed or stopped."""


@pytest.fixture(scope="module")
def tough(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("tough") / "log"
    flags = ("--api-server-count", "2", "--health-timeout", str(HEALTH_TIMEOUT_S))
    with ServeProcess(str(tiny.path), *SHARED_FLAGS, *flags, log=log, preloaded=preloaded) as started:
        started.until_healthy(num_api=2)
        yield started
        started.end_cleanly()


def steady(server: ServeProcess) -> bool:
    """Return whether all processes are healthy and no request runs."""
    return all(server.health() == 200 for _ in range(8)) and server.metrics()["num_requests_running"] == 0


def runs_without(server: ServeProcess, dead: int) -> bool:
    return len(set(server.with_role("APIServer")) - {dead}) == 2


def test_stopped_engine_is_unhealthy_and_resumes(tough: ServeProcess) -> None:
    """Catches a /health that stays 200 with a hung engine, and a stream that is lost over a pause."""
    whole = tough.complete(max_tokens=LENGTH)["choices"][0]["text"]
    core = tough.core
    with tough.streaming(max_tokens=LENGTH) as stream:
        stream_events = [next(stream)]
        os.kill(core, signal.SIGSTOP)
        try:
            eventually("the server is unhealthy", lambda: tough.health() == 503)
            # The other API process may lag behind and still accept a request.
            eventually("both processes report it", lambda: all(tough.health() == 503 for _ in range(8)))
            refused = tough.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        finally:
            os.kill(core, signal.SIGCONT)
        stream_events += stream
    assert refused.status_code == 503
    match = re.search(r"no progress for (\d+\.\d) s; the limit is 10 s", refused.json()["error"]["message"])
    assert match is not None and float(match[1]) >= HEALTH_TIMEOUT_S, (
        "a short pause does not make it unhealthy"
    )
    eventually("the server is healthy again", lambda: steady(tough))
    assert stream_events[-1] == "[DONE]"
    assert (
        "".join(item["choices"][0]["text"] for item in stream_events[:-1] if isinstance(item, dict)) == whole
    )


def test_killed_engine_restarts_and_its_streams_continue(tough: ServeProcess) -> None:
    """Catches streams that hang, a wrong health status, a failed restart, and leftovers."""
    whole = tough.complete(max_tokens=LENGTH)["choices"][0]["text"]
    dead = tough.core
    before = tough.metrics()
    with tough.streaming(max_tokens=LENGTH) as stream:
        stream_events = [next(stream)]
        os.kill(dead, signal.SIGKILL)
        eventually("the server is unhealthy", lambda: tough.health() == 503)
        stream_events += stream
    assert stream_events[-1] == "[DONE]" and joined(stream_events) == whole
    eventually("the server is healthy again", lambda: steady(tough))
    assert tough.core != dead
    assert tough.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    after = tough.metrics()
    assert after["kv_cache_usage_perc"] == 0, "the new engine's gauges start anew"
    assert after["engine_start_time_seconds"] > before["engine_start_time_seconds"]
    assert after["request_resumed_total"] - before["request_resumed_total"] == 1
    assert after["request_success_total:error"] == before["request_success_total:error"]
    assert after["generation_tokens_total"] > before["generation_tokens_total"], "counters never decrease"
    assert len(tough.with_role("APIServer")) == 2


def test_gauges_of_a_dead_engine_are_reset(tough: ServeProcess) -> None:
    """Catches gauges that show the requests of a dead engine until the first request of the next."""
    core = tough.core
    with tough.streaming(max_tokens=8000) as stream:
        next(stream)
        eventually("the request runs", lambda: tough.metrics()["num_requests_running"] == 1)
        os.kill(core, signal.SIGKILL)
        eventually("its gauges are reset", lambda: tough.metrics()["num_requests_running"] == 0)
        assert tough.metrics()["kv_cache_usage_perc"] == 0
        eventually("the next core runs it", lambda: tough.metrics()["num_requests_running"] == 1)
    eventually("the server is healthy again and idle", lambda: steady(tough))
    assert tough.metrics()["kv_cache_usage_perc"] == 0


def test_killed_api_process_ends_only_its_own_requests(tough: ServeProcess) -> None:
    """Catches an API process that is not restarted, or with requests that run on without it."""
    pids = tough.with_role("APIServer")
    earlier = {pid: tough.clients_of(pid) for pid in pids}
    with tough.streaming(max_tokens=8000) as stream:
        next(stream)
        # The process with the stream is the first, so that the stream cannot end before it.
        pids.sort(key=lambda pid: len(tough.clients_of(pid) - earlier[pid]), reverse=True)
        eventually("the request runs", lambda: tough.metrics()["num_requests_running"] == 1)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            eventually("the other still answers", lambda: tough.health() == 200)
            eventually("the process is restarted", partial(runs_without, tough, pid))
        with pytest.raises(httpx.TransportError):
            list(stream)
    assert not set(pids) & set(tough.with_role("APIServer"))
    eventually("its request is gone", lambda: steady(tough))
    assert tough.metrics()["kv_cache_usage_perc"] == 0
    assert tough.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_engine_that_cannot_restart_reports_the_reason_and_retries(
    start: Start, tiny: TextModel, tmp_path: Path
) -> None:
    """Catches a cause that is not reported, and a server that gives up although the cause may pass."""
    copy = tmp_path / "model"
    shutil.copytree(tiny.path, copy)
    weights, aside = copy / "model.safetensors", tmp_path / "aside"
    server = start(model=str(copy))
    server.until_healthy()
    weights.rename(aside)
    os.kill(server.core, signal.SIGKILL)
    eventually("the log has the reason", lambda: "the engine cannot start: " in server.text())
    assert server.health() == 503
    aside.rename(weights)
    server.until_healthy()
    server.end_cleanly()
