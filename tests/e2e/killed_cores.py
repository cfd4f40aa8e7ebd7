"""Streams of every kind, and whether their answers stay the same while engine cores are killed."""

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from threading import Event
from typing import Any

import httpx
from serve_process import PATIENCE_S, ServeProcess, events, eventually

NUM_STREAMS = 16
LENGTH = 400
"""Tokens of an answer that is still running when the core is killed."""
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


def read_answer(
    server: ServeProcess, path: str, body: dict[str, Any], pauses: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return the complete answer of a stream; add its pauses of more than a tenth of a second to
    `pauses`."""
    while True:
        body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}} | body
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh,
            fresh.stream("POST", path, json=body) as reply,
        ):
            if reply.status_code == 503:  # a new request while no core is up
                time.sleep(0.1)
                continue
            assert reply.status_code == 200, (path, body, reply.read(), server.text()[-4000:])
            result, last = [], 0.0
            for event in events(reply.iter_lines()):
                now = time.monotonic()
                if last and now - last > 0.1:
                    pauses.append((now, now - last))
                result.append(event)
                last = now
        return whole(result)


def without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove the cached token count: later requests find their prompt in the cache."""
    answer["usage"].pop("prompt_tokens_details", None)
    return answer


def answer_while_cores_die(
    server: ServeProcess,
    kinds: Mapping[str, tuple[str, dict[str, Any]]],
    *,
    num_cores: int = 1,
    num_deaths: int,
) -> None:
    """Run streams one after the other while cores are killed: every answer equals the undisturbed one. The
    longest pause after each death is printed."""
    is_over, pauses = Event(), list[tuple[float, float]]()
    expected = {kind: without_cached(read_answer(server, *kinds[kind], pauses)) for kind in kinds}
    pauses.clear()

    def repeat(kind: str) -> int:
        count = 0
        while not is_over.is_set():
            assert without_cached(read_answer(server, *kinds[kind], pauses)) == expected[kind], kind
            count += 1
        return count

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(repeat, kind) for _, kind in zip(range(NUM_STREAMS), cycle(kinds))]
        try:
            for number in range(num_deaths):
                eventually("all cores work", lambda: len(server.with_role("EngineCore")) == num_cores)
                eventually("the server is healthy", lambda: server.health() == 200)
                time.sleep(random.uniform(0.5, 3.0))
                assert not any(item.done() for item in streams), [item.exception() for item in streams]
                began = time.monotonic()
                os.kill(server.with_role("EngineCore")[number % num_cores], signal.SIGKILL)
                time.sleep(0.5)
                eventually("the server is healthy", lambda: server.health() == 200)
                time.sleep(1.5)
                longest = max((pause for at, pause in pauses if at >= began), default=0.0)
                print(f"death {number + 1}: longest pause {longest:.2f} s")
        finally:
            is_over.set()
        counts = [item.result() for item in streams]
    print(f"{sum(counts)} answers, {server.metrics()['request_resumed_total']:.0f} resumed")
