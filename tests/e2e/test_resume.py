"""Tests of a server whose only core is killed during streams: they pause, and their answers stay the same."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from killed_cores import (
    CHAT,
    KINDS,
    LENGTH,
    LIST,
    SEEDED,
    TEXT,
    TOOLS,
    answer_while_cores_die,
    stream,
    whole,
    without_cached,
)
from preloaded import Preloaded
from saved import sent
from serve_process import PATIENCE_S, SHARED_FLAGS, ServeProcess, Start, eventually, joined
from tiny_adapter import write_adapter
from tiny_text import TextModel


@pytest.fixture(scope="module")
def single(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("single")
    write_adapter(folder / "styled", json.loads((tiny.path / "config.json").read_text()), 1)
    flags = ("--enable-lora", "--lora-modules", f"styled={folder}/styled")
    log = folder / "log"
    with ServeProcess(str(tiny.path), *SHARED_FLAGS, *flags, log=log, preloaded=preloaded) as started:
        started.until_healthy()
        yield started
        started.end_cleanly()


def test_streams_of_all_kinds_resume_in_the_restarted_core(single: ServeProcess, tiny: TextModel) -> None:
    """Catches text, logprobs and usage that are lost or sent twice, and a grammar that starts over."""
    vectors = tiny.hf.get_input_embeddings()(torch.tensor([1, 40, 300, 77, 310])).detach()
    kinds = KINDS | {"vectors": (TEXT, SEEDED | {"prompt": None, "prompt_embeds": sent(vectors)})}
    dead, is_killed = single.core, Event()

    def kill() -> None:
        os.kill(dead, signal.SIGKILL)
        is_killed.set()

    ready = Barrier(len(kinds), action=kill)

    def disturbed(kind: str) -> dict[str, Any]:
        with stream(single, *kinds[kind]) as chunks:
            result = [next(chunks) for _ in range(5)]
            ready.wait(PATIENCE_S)
            return whole([*result, *chunks])

    def undisturbed(kind: str) -> dict[str, Any]:
        with stream(single, *kinds[kind]) as chunks:
            return whole(list(chunks))

    with ThreadPoolExecutor(len(kinds)) as pool:
        os.kill(dead, signal.SIGSTOP)  # all streams start together: none ends before another has started
        answers = pool.map(disturbed, kinds)
        eventually(
            "all requests wait", lambda: single.client.get("/load").json()["server_load"] == len(kinds)
        )
        os.kill(dead, signal.SIGCONT)
        assert is_killed.wait(PATIENCE_S)
        eventually("the server is unhealthy", lambda: single.health() == 503)
        new = single.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        result = dict(zip(kinds, answers, strict=True))
        expected = dict(zip(kinds, pool.map(undisturbed, kinds), strict=True))
    assert new.status_code == 200, "a new request waits, too"
    for kind in kinds:
        assert without_cached(result[kind]) == without_cached(expected[kind]), kind
    assert len(json.loads(result["schema"]["choices"][0]["text"])) == LIST["minItems"]
    assert single.core != dead and single.health() == 200
    numbers = single.metrics()
    assert numbers["request_resumed_total"] == len(kinds)
    assert numbers["request_success_total:error"] == 0


def test_disconnect_during_the_pause_leaves_nothing(single: ServeProcess) -> None:
    before = single.metrics()
    with single.streaming(max_tokens=8000) as chunks:
        next(chunks)
        os.kill(single.core, signal.SIGKILL)
        eventually("the server is unhealthy", lambda: single.health() == 503)
        eventually("its gauges are reset", lambda: single.metrics()["num_requests_running"] == 0)
    eventually("the server is healthy again", lambda: single.health() == 200)
    eventually("the request was aborted", lambda: single.metrics()["request_success_total:abort"] == 1)
    after = single.metrics()
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0
    assert after["request_resumed_total"] == before["request_resumed_total"]


def test_sigterm_during_the_pause_lets_answers_finish(start: Start) -> None:
    """Catches a core that is not restarted while the server drains, and streams that wait for it forever."""
    server = start("--shutdown-timeout", "100")
    server.until_healthy()
    core = server.core
    with server.streaming(max_tokens=LENGTH) as chunks:
        stream_events = [next(chunks)]
        os.kill(core, signal.SIGKILL)
        eventually("the server is unhealthy", lambda: server.health() == 503)
        server.process.send_signal(signal.SIGTERM)
        stream_events += chunks
    assert (
        stream_events[-1] == "[DONE]"
        and isinstance(stream_events[-2], dict)
        and "error" not in stream_events[-2]
    ), stream_events[-2]
    assert stream_events[-2]["choices"][0]["finish_reason"] == "length"
    assert server.exit_code() == 0, server.text()
    assert "Traceback" not in server.text(), server.text()


def test_core_that_cannot_restart_ends_its_streams(start: Start, tiny: TextModel, tmp_path: Path) -> None:
    """Catches streams that wait forever for a core that cannot start."""
    copy = tmp_path / "model"
    shutil.copytree(tiny.path, copy)
    server = start("--health-timeout", "2", model=str(copy))
    server.until_healthy()
    with server.streaming(max_tokens=8000) as chunks:
        next(chunks)
        (copy / "model.safetensors").rename(tmp_path / "aside")
        os.kill(server.core, signal.SIGKILL)
        results = list(chunks)
    assert results[-1] == "[DONE]" and isinstance(results[-2], dict)
    assert results[-2]["error"]["code"] == 503 and "was not restarted" in results[-2]["error"]["message"]
    server.end_cleanly()


def test_resumption_can_be_disabled(start: Start) -> None:
    """Without resumption, a stream ends with an error. A request without any sent output is still
    answered."""
    server = start("--no-resume-requests")
    server.until_healthy()
    expected = server.complete(max_tokens=LENGTH)["choices"][0]["text"]
    core = server.core
    with ThreadPoolExecutor(1) as pool, server.streaming(max_tokens=8000) as chunks:
        os.kill(core, signal.SIGSTOP)
        hidden = pool.submit(server.complete, max_tokens=LENGTH)
        eventually("both requests are sent", lambda: server.client.get("/load").json()["server_load"] == 2)
        os.kill(core, signal.SIGCONT)
        results = [next(chunks) for _ in range(20)]  # the core computes both
        os.kill(core, signal.SIGKILL)
        results += chunks
        assert hidden.result()["choices"][0]["text"] == expected
    assert results[-1] == "[DONE]" and joined(results[:-2])
    assert isinstance(results[-2], dict) and results[-2]["error"]["code"] == 503
    assert "died" in results[-2]["error"]["message"]
    assert server.metrics()["request_resumed_total"] == 0
    server.end_cleanly()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_twenty_core_failures_under_sixteen_streams(
    tiny: TextModel, tmp_path: Path, preloaded: Preloaded, num_cores: int
) -> None:
    write_adapter(tmp_path / "styled", json.loads((tiny.path / "config.json").read_text()), 1)
    flags = (*SHARED_FLAGS, "--enable-lora", "--lora-modules", f"styled={tmp_path}/styled")
    flags = (*flags, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "-dp", str(num_cores))
    kinds = KINDS | {"tools": (CHAT, TOOLS)}
    with ServeProcess(str(tiny.path), *flags, log=tmp_path / "log", preloaded=preloaded) as server:
        server.until_healthy(num_api=num_cores)
        answer_while_cores_die(server, kinds, num_cores=num_cores, num_deaths=20)
        server.end_cleanly()
