"""Sends requests to a server at a given rate, and records when their tokens arrive."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from quire.bench.datasets import Query
from quire.errors import ConfigError, QuireError
from quire.remote.http import HttpClient
from quire.remote.openai import Chunk, stream

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Default endpoint path of each value of `--backend`."""


@dataclass(slots=True)
class Record:
    """Timings of one request, in seconds of `time.perf_counter()`."""

    prompt_len: int
    start: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Time at which each piece of the output arrived: one token, or several together."""
    pieces: list[str] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    """Number of tokens of each piece, if the server reports usage in every chunk; otherwise empty."""
    num_tokens: int | None = None
    """Number of output tokens reported by the server."""
    num_cached: int | None = None
    """Number of prompt tokens from the prefix cache; None if the server does not report it."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens of the output, if the server returns them."""
    error: str = ""

    def take(self, chunk: Chunk) -> None:
        before = self.num_tokens or 0
        if chunk.usage is not None:
            self.prompt_len = chunk.usage.prompt_tokens or self.prompt_len
            self.num_tokens = chunk.usage.completion_tokens
            if (details := chunk.usage.prompt_tokens_details) is not None:
                self.num_cached = details.cached_tokens
        if not chunk.choices:
            return
        text, choice = chunk.text, chunk.choices[0]
        self.token_ids += choice.token_ids or ()
        ended = choice.finish_reason is not None
        # Chats begin with a chunk that only has the role. Some servers end with a chunk without text, which
        # may stand for an output without text (special tokens).
        if text or (choice.delta is None and not ended) or (ended and not self.arrivals):
            self.arrivals.append(time.perf_counter())
            self.pieces.append(text)
            if chunk.usage is not None and self.num_tokens is not None:
                self.counted.append(self.num_tokens - before)

    @property
    def output_len(self) -> int:
        return len(self.arrivals) if self.num_tokens is None else self.num_tokens

    @property
    def ttft(self) -> float:
        return (self.arrivals[0] if self.arrivals else self.end) - self.start

    @property
    def latency(self) -> float:
        return (self.arrivals[-1] if self.arrivals else self.end) - self.start

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


def request_body(query: Query, *, backend: str, model: str, options: dict[str, Any]) -> bytes:
    shared = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if backend == "openai-chat":
        if not isinstance(query.prompt, str):
            raise ConfigError("the backend openai-chat needs prompts as text: give --tokenizer MODEL")
        text = {"type": "text", "text": query.prompt}
        content = [text, *query.media] if query.media else query.prompt
        messages = [{"role": "user", "content": content}]
        fields: dict[str, Any] = {"messages": messages, "max_completion_tokens": query.output_len}
    else:
        fields = {"prompt": query.prompt, "max_tokens": query.output_len}
    return msgspec.json.encode(shared | fields | options)


def send_times(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which each request is sent. Gaps are gamma-distributed, a Poisson
    process at a burstiness of 1, and scaled to `count / rate` seconds in total."""
    if rate == float("inf"):
        return [0.0] * count
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, size=count))
    return [float(seconds) for seconds in times * (count / rate / times[-1])]


async def send(client: HttpClient, path: str, body: bytes, prompt_len: int) -> Record:
    """Send one streamed request and return its record when it ends; a failure is stored in the record, not
    raised."""
    record = Record(prompt_len, start=time.perf_counter())
    try:
        await stream(client, path, body, record.take)
    except QuireError as error:
        record.error = str(error)
    record.end = time.perf_counter()
    return record


async def drive(
    client: HttpClient,
    path: str,
    requests: Sequence[tuple[bytes, int]],
    *,
    times: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[Record], object],
) -> list[Record]:
    """Send `requests` (body, prompt length), each at its entry of `times` (seconds after the start); return
    their records in the same order."""
    slots: AbstractAsyncContextManager[Any] = nullcontext()
    if max_concurrency is not None:
        slots = asyncio.Semaphore(max_concurrency)

    async def one(body: bytes, prompt_len: int) -> Record:
        async with slots:
            record = await send(client, path, body, prompt_len)
        on_done(record)
        return record

    start = time.perf_counter()
    tasks: list[asyncio.Task[Record]] = []
    async with asyncio.TaskGroup() as group:
        for (body, prompt_len), at in zip(requests, times, strict=True):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body, prompt_len)))
    return [task.result() for task in tasks]


def token_times(records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Yield the time of every arrival with its number of tokens, estimated if the server does not report
    it."""
    for record in records:
        yield from zip(record.arrivals, _tokens_per_piece(record), strict=True)


def _tokens_per_piece(record: Record) -> Sequence[float]:
    """Return the tokens of each piece: as the server reports them, or else one each and the remaining tokens
    by length of text."""
    count, num_tokens = len(record.arrivals), record.output_len
    if count and len(record.counted) == count and sum(record.counted) == num_tokens:
        return record.counted
    letters = [len(piece) for piece in record.pieces]
    if num_tokens < count or not sum(letters) or len(letters) != count:
        return [num_tokens / count] * count if count else []
    return [1 + (num_tokens - count) * length / sum(letters) for length in letters]
