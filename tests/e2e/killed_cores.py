"""Streams of every kind, and checks that their answers stay the same while engine cores are killed."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import httpx
from serve_process import PATIENCE_S, ServeProcess, events, eventually, greedy

NUM_STREAMS = 16
LENGTH = 400
"""Number of tokens of an answer that still runs when the core is killed."""
LIST = {
    "type": "array",
    "items": {"type": "string", "minLength": 4, "maxLength": 4},
    "minItems": 60,
    "maxItems": 60,
}
BOUND = {"json": LIST, "disable_any_whitespace": True}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLAIN = {"prompt": "The quick", "temperature": 0, "ignore_eos": True, "max_tokens": LENGTH}
SEEDED = PLAIN | {"temperature": 1, "seed": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TEXT, PLAIN),
    "seeded": (TEXT, SEEDED),
    "several": (TEXT, SEEDED | {"n": 2}),
    "logprobs": (TEXT, SEEDED | {"logprobs": 2}),
    "penalties": (TEXT, SEEDED | {"frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "schema": (TEXT, SEEDED | {"ignore_eos": False, "structured_outputs": BOUND, "max_tokens": 2000}),
    "adapter": (TEXT, SEEDED | {"model": "styled"}),
    "chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "A page is"}],
            "temperature": 1,
            "seed": 5,
            "ignore_eos": True,
            "max_tokens": LENGTH,
            "logprobs": True,
        },
    ),
}
TOOLS = {
    "messages": [{"role": "user", "content": "A page is"}],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": LIST}}},
        }
    ],
    "tool_choice": "required",
    "temperature": 1,
    "seed": 6,
    "max_tokens": 2000,
}


@contextmanager
def stream(server: ServeProcess, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any] | str]]:
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}} | body
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh,
        fresh.stream("POST", path, json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield events(reply.iter_lines())


def whole(stream_events: list[dict[str, Any] | str]) -> dict[str, Any]:
    """Return the text, logprobs and finish reason of each choice of a stream, and the usage."""
    assert stream_events[-1] == "[DONE]" and isinstance(stream_events[-2], dict), stream_events[-2:]
    answers: dict[int, dict[str, Any]] = {}
    for event in stream_events[:-1]:
        assert isinstance(event, dict) and "error" not in event, event
        for choice in event["choices"]:
            sequence = answers.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
            sequence["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            for call in choice.get("delta", {}).get("tool_calls") or ():
                sequence["text"] += call["function"].get("arguments") or ""
            logprobs = choice.get("logprobs") or {}
            sequence["logprobs"] += logprobs.get("tokens") or [
                entry["token"] for entry in logprobs.get("content") or ()
            ]
            sequence["end"] = choice["finish_reason"] or sequence["end"]
    return {"choices": answers, "usage": stream_events[-2]["usage"]}


def time_without_cpu_waits() -> float:
    """Return a clock that stops while this thread is ready to run but all CPUs run other threads."""
    path = Path("/proc/thread-self/schedstat")
    return time.monotonic() - (int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0)


async def read_answer(
    fresh: httpx.AsyncClient, path: str, body: dict[str, Any], pauses: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return the complete answer of a stream. Append each pause of more than 0.1 s to `pauses`, with the time
    at which it ended."""
    while True:
        body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}} | body
        async with fresh.stream("POST", path, json=body) as reply:
            if reply.status_code == 503:  # a new request while no core is up
                await asyncio.sleep(0.1)
                continue
            assert reply.status_code == 200, (path, body, await reply.aread())
            result, last = list[dict[str, Any] | str](), 0.0
            async for line in reply.aiter_lines():
                for event in events(iter([line])):
                    now = time_without_cpu_waits()
                    if last and now - last > 0.1:
                        pauses.append((time.monotonic(), now - last))
                    result.append(event)
                    last = now
        return whole(result)


def without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove the number of cached tokens from an answer, since later requests find their prompt in the
    cache."""
    answer["usage"].pop("prompt_tokens_details", None)
    return answer


async def read_answers(
    server: ServeProcess,
    kinds: Mapping[str, tuple[str, dict[str, Any]]],
    pauses: list[tuple[float, float]],
    begun: Event,
    is_over: Event,
) -> int:
    """Read answers of an undisturbed server, then 16 streams at a time until `is_over` is set, and check that
    each equals its undisturbed answer. Return the number of answers.

    One thread reads all streams: several threads would wait for each other, and the pauses would be those of
    the clients."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as fresh:
        expected = {kind: without_cached(await read_answer(fresh, *kinds[kind], pauses)) for kind in kinds}
        pauses.clear()
        begun.set()

        async def repeat(kind: str) -> int:
            count = 0
            while not is_over.is_set():
                answer = without_cached(await read_answer(fresh, *kinds[kind], pauses))
                assert answer == expected[kind], kind
                count += 1
            return count

        return sum(await asyncio.gather(*(repeat(kind) for kind in islice(cycle(kinds), NUM_STREAMS))))


def all_answer(server: ServeProcess, num_cores: int) -> bool:
    """Return whether each core answers a request that is routed to it."""
    return all(
        server.client.post(
            TEXT, json=greedy(max_tokens=1), headers={"X-data-parallel-rank": str(rank)}
        ).status_code
        == 200
        for rank in range(num_cores)
    )


def answer_while_cores_die(
    server: ServeProcess,
    kinds: Mapping[str, tuple[str, dict[str, Any]]],
    *,
    num_cores: int = 1,
    num_deaths: int,
) -> None:
    """Run streams while cores are killed, and check that every answer equals the undisturbed one. The longest
    pause after each death is printed."""
    begun, is_over, pauses, worst = Event(), Event(), list[tuple[float, float]](), list[float]()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(asyncio.run, read_answers(server, kinds, pauses, begun, is_over))
        try:
            eventually("the streams have begun", lambda: begun.is_set() or reading.done())
            for number in range(num_deaths):
                eventually("all cores answer", lambda: all_answer(server, num_cores))
                time.sleep(random.uniform(0.5, 3.0))
                assert not reading.done(), reading.exception()
                os.kill(server.with_role("EngineCore")[number % num_cores], signal.SIGKILL)
                killed_at = time.monotonic()
                time.sleep(0.5)
                eventually("all cores answer", lambda: all_answer(server, num_cores))
                back_s = time.monotonic() - killed_at
                time.sleep(1.5)
                worst.append(max((pause for at, pause in pauses if at >= killed_at), default=0.0))
                print(f"death {number + 1}: longest pause {worst[-1]:.2f} s, core back after {back_s:.1f} s")
        finally:
            is_over.set()
        count = reading.result()
    print(f"{count} answers, {server.metrics()['request_resumed_total']:.0f} resumed")
    print(f"longest pauses: median {median(worst):.2f} s, maximum {max(worst):.2f} s")
