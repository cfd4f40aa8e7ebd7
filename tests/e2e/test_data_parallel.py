"""Tests of two cores behind one address: they answer like one, and one answers while the other is dead."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from preloaded import Preloaded
from serve_process import (
    PATIENCE_S,
    SHARED_FLAGS,
    ServeProcess,
    Start,
    eventually,
    free_port,
    joined,
    samples,
)
from tiny_text import TextModel

PROMPTS = ["The quick", "A page is", "One two three", "a book; a quire", "naïve café", "dog"]
LENGTH = 500
"""Number of tokens of an answer that still runs when a process is killed or stopped."""


@pytest.fixture(scope="module")
def pair(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("pair") / "log"
    flags = ("-dp", "2", "--health-timeout", "10")
    with ServeProcess(str(tiny.path), *SHARED_FLAGS, *flags, log=log, preloaded=preloaded) as started:
        started.until_healthy(num_api=2)
        yield started
        started.end_cleanly()


def by_engine(server: ServeProcess, name: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for sample, labels, value in samples(server.client.get("/metrics").text):
        if sample == f"vllm:{name}" and "le" not in labels:
            values[labels["engine"]] = values.get(labels["engine"], 0.0) + value
    return values


def cores(server: ServeProcess) -> dict[int, int]:
    """Return the process ids of the cores by rank, from the log."""
    alive = server.with_role("EngineCore")
    logged = re.findall(r"\(EngineCore_DP(\d) pid=(\d+)\)", server.text())
    return {int(rank): int(pid) for rank, pid in logged if int(pid) in alive}


def at_rest(server: ServeProcess) -> bool:
    numbers = server.metrics()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(server.health() == 200 for _ in range(4)) and not any(
        sum(by_engine(server, name).values()) for name in gauges if name in numbers
    )


def ask(server: ServeProcess, rank: int | None = None, **body: Any) -> httpx.Response:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    fields = {"model": "tiny", "prompt": "The quick", "temperature": 0, "ignore_eos": True} | body
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh:
        return fresh.post("/v1/completions", json=fields, headers=headers)


def test_two_cores_answer_like_one_and_have_separate_metrics(
    pair: ServeProcess, server: ServeProcess
) -> None:
    """Catches a different answer, ranks that are not honoured, and metrics without their engine."""
    expected = [server.complete(prompt=prompt, max_tokens=12)["choices"][0]["text"] for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda prompt: ask(pair, prompt=prompt, max_tokens=12), PROMPTS))
    assert [reply.json()["choices"][0]["text"] for reply in replies] == expected
    before = by_engine(pair, "request_success_total")
    assert ask(pair, rank=1, max_tokens=3, n=2, temperature=1).json()["usage"]["completion_tokens"] == 6
    after = by_engine(pair, "request_success_total")
    assert {engine: after[engine] - before[engine] for engine in after} == {"0": 0, "1": 2}
    assert by_engine(pair, "cache_config_info") == {"0": 1, "1": 1}
    refused = ask(pair, rank=2)
    assert refused.status_code == 400 and "ranks 0 to 1" in refused.json()["error"]["message"]
    eventually("the log names both cores", lambda: len(cores(pair)) == 2)


def test_equal_prefixes_are_routed_to_one_cache(pair: ServeProcess) -> None:
    """Catches routing that spreads the turns of a conversation over several caches."""
    text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4
    before = by_engine(pair, "prefix_cache_hits_total")
    for i in range(4):
        assert ask(pair, prompt=f"{text}{i}", max_tokens=2).status_code == 200
    after = by_engine(pair, "prefix_cache_hits_total")
    # Both API processes may have to find out where the prefix is cached.
    hits = sorted(after[engine] - before[engine] for engine in after)
    assert hits[1] > 0 and sum(hits) >= 2 * hits[1] / 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_core_under_load(pair: ServeProcess, how: int) -> None:
    """Catches requests that hang, a server that is down with one core, a core that does not restart, and
    counters that keep the values of the dead core."""
    eventually("the server is idle", lambda: at_rest(pair))
    eventually("both cores have logged", lambda: len(cores(pair)) == 2)
    victim = cores(pair)[1]
    expected = ask(pair, max_tokens=LENGTH).json()["choices"][0]["text"]
    with ThreadPoolExecutor(12) as pool, pair.streaming(max_tokens=LENGTH) as stream:
        stream_events = [next(stream)]
        running: list[Future[httpx.Response]] = []

        def second_core_works() -> bool:
            """Return whether the second core is busy; give it more work if it has finished."""
            num_missing = 6 - sum(not reply.done() for reply in running)
            running.extend(pool.submit(ask, pair, max_tokens=LENGTH) for _ in range(num_missing))
            return by_engine(pair, "num_requests_running")["1"] > 0

        eventually("the second core works", second_core_works)
        os.kill(victim, how)
        later = [pool.submit(ask, pair, max_tokens=5, rank=0) for _ in range(3)]
        assert all(item.result().status_code == 200 for item in later)
        if how == signal.SIGSTOP:
            eventually("a hung core is reported", lambda: pair.health() == 503)
            assert ask(pair, max_tokens=5).status_code == 200
            os.kill(victim, signal.SIGCONT)
        replies = [item.result() for item in running]
        stream_events += stream
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {expected}
    assert stream_events[-1] == "[DONE]" and joined(stream_events) == expected
    eventually("the server is healthy and idle", lambda: at_rest(pair))
    assert ask(pair, max_tokens=3, rank=1).status_code == 200
    assert (cores(pair)[1] != victim) == (how == signal.SIGKILL)
    assert len(pair.with_role("EngineCore")) == len(pair.with_role("APIServer")) == 2


def signal_cores(server: ServeProcess, number: int) -> None:
    for pid in server.with_role("EngineCore"):
        os.kill(pid, number)


def ends_with_done(stream: Iterator[Any]) -> bool:
    try:
        return list(stream)[-1] == "[DONE]"
    except httpx.TransportError:
        return False


def test_lost_api_process_under_load(pair: ServeProcess) -> None:
    """Catches cores that keep computing for a client that is gone."""
    eventually("the server is idle", lambda: at_rest(pair))
    processes = pair.with_role("APIServer")
    dead = processes[0]
    earlier = {pid: pair.clients_of(pid) for pid in processes}
    with ExitStack() as stack:
        streams: list[Iterator[Any]] = []
        while not all(pair.clients_of(pid) - earlier[pid] for pid in processes):
            assert len(streams) < 40, "the kernel gives every connection to one process"
            signal_cores(pair, signal.SIGCONT)
            streams.append(stack.enter_context(pair.streaming(max_tokens=24 * LENGTH)))
            next(streams[-1])
            signal_cores(pair, signal.SIGSTOP)  # No stream ends before the process does.
        os.kill(dead, signal.SIGKILL)
        signal_cores(pair, signal.SIGCONT)
        alive = [ends_with_done(stream) for stream in streams]
    assert True in alive and False in alive, "only the streams of the other process continue"
    eventually("the process is back", lambda: len(set(pair.with_role("APIServer")) - {dead}) == 2)
    eventually("the server is healthy and idle", lambda: at_rest(pair))


@pytest.mark.slow
def test_head_and_headless_server(start: Start, tiny: TextModel) -> None:
    """Catches ranks that must join in order, metrics that stay on the other machine, and leftovers."""
    rpc = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
    two = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", *rpc)
    node = start(*two, "--headless", "--data-parallel-start-rank", "1")
    eventually("the headless server starts before the head", lambda: bool(node.text()))
    head = start(*two, "--api-server-count", "1")
    wrong = start("--headless", "-dp", "4", "-dpl", "1", "-dpr", "3", *rpc)
    head.until_healthy()
    assert wrong.exit_code() == 1
    assert "data_parallel_size is 2 at the head, and 4 at" in wrong.text()
    again = start(*two, "--headless", "--data-parallel-start-rank", "1")
    assert again.exit_code() == 1
    assert "data-parallel rank 1 is taken by" in again.text()
    one = ask(head, rank=0, max_tokens=9).json()["choices"][0]["text"]
    assert ask(head, rank=1, max_tokens=9).json()["choices"][0]["text"] == one
    eventually("its metrics are served", lambda: by_engine(head, "prompt_tokens_total")["1"] > 0)
    dead = node.core
    with head.streaming(max_tokens=8000) as stream:
        next(stream)
        os.kill(dead, signal.SIGKILL)
        replies = [ask(head, max_tokens=5) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200] * 4
    eventually("the process is back", lambda: ask(head, rank=1, max_tokens=3).status_code == 200)
    head.process.send_signal(signal.SIGTERM)
    assert head.exit_code() == node.exit_code() == 0, node.text()


def test_impossible_layout_is_a_one_line_error(start: Start) -> None:
    taken = free_port()
    rpc = ("-dpp", str(taken))
    first = start("-dp", "2", "-dpl", "1", *rpc)
    eventually("the server listens", lambda: "APIServer" in first.text())
    second = start("-dp", "2", "-dpl", "1", *rpc)
    assert second.exit_code() == 1
    last = second.text().strip().splitlines()[-1]
    assert f"cannot listen on 127.0.0.1:{taken} for data-parallel ranks: Address already in use" in last
