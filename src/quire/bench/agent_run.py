"""Runs agent sessions against a server: hit rate, TTFT by turn, and cost against a perfect cache."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.bench.agent import AgentPrompt, AgentSession, AgentTurn, PerfectCache, first_fields
from quire.bench.report import WIDTH
from quire.bench.traffic import Record, send
from quire.remote.http import HttpClient

MAX_GROUPS = 6
"""Maximum number of lines with the TTFT of a group of turns."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The result of one turn."""

    session: str
    number: int
    """Number of the turn in its session, from 0."""
    num_perfect: int
    """Prompt tokens that a prefix cache of unlimited size would have hit."""
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClient:
    """Sends the turns of sessions. Each turn waits for the answer to the turn before."""

    client: HttpClient
    path: str
    model: str
    options: Mapping[str, Any]
    """Additional fields of the JSON body of every request."""
    hint: str
    """Name of the field by which a request tells the server its session: `session`, `key` or `none`."""
    vocab: int
    seed: int
    shared_len: int = 0
    max_concurrency: int | None = None

    def body(self, name: str, token_ids: Sequence[int], output_len: int) -> bytes:
        fields = {
            "model": self.model,
            "prompt": token_ids,
            "max_tokens": output_len,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(fields | first_fields(self.hint, name) | dict(self.options))

    async def run(
        self, sessions: Sequence[AgentSession], starts: Sequence[float], on_done: Callable[[], object]
    ) -> list[TurnRecord]:
        """Run all sessions, each from its entry of `starts` on (seconds); return the turns in the order in
        which they end."""
        begin, cache, turns = time.perf_counter(), PerfectCache(), list[TurnRecord]()
        slots: AbstractAsyncContextManager[Any] = nullcontext()
        if self.max_concurrency is not None:
            slots = asyncio.Semaphore(self.max_concurrency)

        async def one(session: AgentSession, start: float) -> None:
            prompt = AgentPrompt(session.name, vocab=self.vocab, seed=self.seed, shared_len=self.shared_len)
            await _sleep_until(begin + start)
            for number, turn in enumerate(session.turns):
                await asyncio.sleep(turn.pause_s)
                if turn.at_s is not None:
                    await _sleep_until(begin + turn.at_s)
                token_ids = prompt.turn(turn)
                num_perfect = cache.hit(token_ids)
                async with slots:
                    record = await self._send(session.name, turn, token_ids)
                turns.append(TurnRecord(session.name, number, num_perfect, record))
                on_done()
                if record.error:
                    return
                # A server that does not return token ids gets the prompt without its answer.
                prompt.answer(record.token_ids)
                cache.add(prompt.token_ids)

        async with asyncio.TaskGroup() as group:
            for session, start in zip(sessions, starts, strict=True):
                group.create_task(one(session, start))
        return turns

    async def _send(self, name: str, turn: AgentTurn, token_ids: Sequence[int]) -> Record:
        return await send(self.client, self.path, self.body(name, token_ids, turn.output_len), len(token_ids))


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(at - time.perf_counter(), 0.0))


def agent_summary(turns: Sequence[TurnRecord], num_hit: int | None = None) -> dict[str, Any]:
    """Return the results of all turns by name. `num_hit` is the server's count of prefix cache hit tokens,
    for a server that does not report the cached tokens of each request."""
    done = [turn for turn in turns if not turn.record.error]
    num_prompt = sum(turn.record.prompt_len for turn in done)
    if not num_prompt:
        return {}
    reported = [turn.record.num_cached for turn in done if turn.record.num_cached is not None]
    num_cached = sum(reported) if len(reported) == len(done) else num_hit
    num_perfect = sum(turn.num_perfect for turn in done)
    by_turn: dict[int, list[TurnRecord]] = {}
    for turn in done:
        by_turn.setdefault(turn.number, []).append(turn)
    summary: dict[str, Any] = {
        "agent_sessions": len({turn.session for turn in turns}),
        "agent_perfect_hit_rate": 100 * num_perfect / num_prompt,
        "agent_perfect_computed_tokens": num_prompt - num_perfect,
        "agent_ttft_by_turn_ms": [
            float(np.median([turn.record.ttft for turn in by_turn[number]])) * 1e3
            for number in sorted(by_turn)
        ],
    }
    if num_cached is not None:
        summary |= {
            "agent_hit_rate": 100 * num_cached / num_prompt,
            "agent_hit_rate_of_perfect": 100 * num_cached / num_perfect if num_perfect else 100.0,
            "agent_computed_tokens": num_prompt - num_cached,
            "agent_cost_of_perfect": (num_prompt - num_cached) / max(num_prompt - num_perfect, 1),
        }
    return summary


def agent_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the printed lines of an agent run."""
    if "agent_sessions" not in result:
        return []
    titles = {
        "agent_sessions": ("Sessions:", "<10"),
        "agent_hit_rate": ("Prompt tokens from the cache (%):", "<10.2f"),
        "agent_perfect_hit_rate": ("With a perfect cache (%):", "<10.2f"),
        "agent_hit_rate_of_perfect": ("Hits of a perfect cache (%):", "<10.2f"),
        "agent_computed_tokens": ("Prompt tokens computed:", "<10"),
        "agent_perfect_computed_tokens": ("With a perfect cache:", "<10"),
        "agent_cost_of_perfect": ("Cost against a perfect cache (x):", "<10.2f"),
    }
    rows = [f"{title:<40} {result[key]:{form}}" for key, (title, form) in titles.items() if key in result]
    times = result["agent_ttft_by_turn_ms"]
    for first, end in _groups(len(times)):
        name = f"turn {first + 1}" if end == first + 1 else f"turns {first + 1} to {end}"
        rows.append(f"{f'Median TTFT (ms), {name}:':<40} {float(np.median(times[first:end])):<10.2f}")
    return [f"{'Agent Sessions':-^{WIDTH}}", *rows]


def _groups(num_turns: int) -> list[tuple[int, int]]:
    """Return the ranges (first, end) of a conversation's turns that a table shows in one row, without the
    end: the first turn alone, then ranges of equal length, at most MAX_GROUPS in all."""
    size = max(-(-(num_turns - 1) // (MAX_GROUPS - 1)), 1)
    starts = [0, *range(1, num_turns, size)]
    return [(start, min(end, num_turns)) for start, end in zip(starts, [*starts[1:], num_turns], strict=True)]
