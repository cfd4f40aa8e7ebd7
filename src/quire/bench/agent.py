"""Agent sessions for benchmarks: prompts that grow turn by turn, synthetic or from a trace."""

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens that an entry of `hash_ids` in a trace stands for."""
MIN_TURN_TOKENS = 1
_P99 = 2.326
"""Standard deviations from the median to the 99th percentile of a normal distribution."""

Range = tuple[int, int]


def range_of(text: str) -> Range:
    """Parse a range such as `33:43`, or a single number, as its smallest and largest value."""
    low, mark, high = text.partition(":")
    try:
        bounds = int(low), int(high if mark else low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or LOW:HIGH with 1 <= LOW <= HIGH")
    return bounds


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of a session."""

    prompt_len: int
    """Tokens of the whole prompt: the prompt of the turn before, the answer to it, and new tokens."""
    output_len: int
    pause_s: float = 0.0
    """Seconds to wait after the answer to the turn before, or after the start of the session."""
    at_s: float | None = None
    """Earliest time of the request, in seconds after the start of the run; None: no limit."""
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks of TRACE_BLOCK tokens; empty: the prompt continues the turn before."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A conversation of an agent with a model."""

    name: str
    turns: list[AgentTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """Distribution of synthetic sessions. Lengths are in tokens, times in seconds."""

    turns: Range
    first_len: int
    """Number of tokens of the first prompt of a session."""
    last_len: Range
    """Range of the number of tokens of the last prompt of a session."""
    input_per_output: float
    """Number of prompt tokens per generated token, over the whole session."""
    tool_spread: float
    """Standard deviation of the natural logarithm of the lengths of tool results, in tokens."""
    pause_median_s: float
    pause_p99_s: float
    """99th percentile, in seconds, of the pauses between turns, which are log-normal."""
    think_s: float
    """Mean seconds that a user thinks, added to the pause before a turn with a new user message."""
    think_every: int
    """Number of turns from one user message to the next; turns in between begin with a tool result."""
    scale: float
    """Factor by which all lengths in tokens are multiplied."""
    time_scale: float
    """Factor by which all times are multiplied."""


def synthetic_sessions(count: int, shape: AgentShape, *, seed: int) -> list[AgentSession]:
    draw = random.Random(seed)
    return [AgentSession(f"agent-{seed}-{number}", _synthetic_turns(shape, draw)) for number in range(count)]


def _synthetic_turns(shape: AgentShape, draw: random.Random) -> list[AgentTurn]:
    num_turns = draw.randint(*shape.turns)
    first = max(round(shape.first_len * shape.scale), 1)
    last = max(round(draw.randint(*shape.last_len) * shape.scale), first)
    output = max(round((first + last) / 2 / shape.input_per_output), 1)
    weights = [draw.lognormvariate(0.0, shape.tool_spread) for _ in range(num_turns - 1)]
    results = max(last - first - output * (num_turns - 1), 0)
    turns, prompt_len, growth = [AgentTurn(first, output)], first, 0.0
    for number, weight in enumerate(weights, 1):
        growth += results * weight / sum(weights)
        prompt_len = max(first + output * number + round(growth), prompt_len + output + MIN_TURN_TOKENS)
        turns.append(AgentTurn(prompt_len, output, _pause(shape, draw, number)))
    return turns


def _pause(shape: AgentShape, draw: random.Random, number: int) -> float:
    median, p99 = shape.pause_median_s, shape.pause_p99_s
    sigma = math.log(p99 / median) / _P99 if median > 0 else 0.0
    pause = median * math.exp(draw.gauss(0.0, sigma))
    thinks = shape.think_s > 0 and number % shape.think_every == 0
    return (pause + (draw.expovariate(1 / shape.think_s) if thinks else 0.0)) * shape.time_scale


class _TraceLine(msgspec.Struct):
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    session_id: str | int | None = None
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Milliseconds after the start of the run at which the request may be sent."""
    delay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds to wait before the request."""
    hash_ids: tuple[int, ...] = ()


def trace_sessions(path: Path, *, scale: float = 1.0, time_scale: float = 1.0) -> list[AgentSession]:
    """Read a trace of JSON lines as sessions. Lines with the same `session_id` are the turns of one
    session; a line without one is a session of its own. `scale` multiplies lengths, `time_scale` times."""
    sessions: dict[str, list[AgentTurn]] = {}
    for number, line in _trace_lines(path):
        name = f"line {number}" if line.session_id is None else f"session {line.session_id}"
        if line.hash_ids and len(line.hash_ids) * TRACE_BLOCK < line.input_length:
            raise ConfigError(
                f"{path}, line {number}: {len(line.hash_ids)} hash_ids are {len(line.hash_ids) * TRACE_BLOCK}"
                f" tokens, fewer than input_length ({line.input_length}): each stands for {TRACE_BLOCK}"
            )
        sessions.setdefault(name, []).append(
            AgentTurn(
                prompt_len=max(round(line.input_length * scale), 1),
                output_len=max(round(line.output_length * scale), 1),
                pause_s=line.delay * time_scale,
                at_s=None if line.timestamp is None else line.timestamp / 1e3 * time_scale,
                hash_ids=line.hash_ids,
            )
        )
    if not sessions:
        raise ConfigError(f"{path} has no lines")
    return [AgentSession(name, turns) for name, turns in sessions.items()]


def _trace_lines(path: Path) -> Iterator[tuple[int, _TraceLine]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            yield number, msgspec.convert(json.loads(text), _TraceLine)
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; a line is an object with input_length, output_length and"
                " optionally session_id, timestamp (ms), delay (s), hash_ids"
            ) from None


class AgentPrompt:
    """Builds the prompts of one session from random token ids; each turn's prompt continues the one
    before."""

    def __init__(self, name: str, *, vocab: int, seed: int, shared_len: int = 0) -> None:
        """The first `shared_len` tokens are common to all sessions with the same seed."""
        self.token_ids: list[int] = []
        self._vocab, self._seed, self._shared_len = vocab, seed, shared_len
        self._draw = random.Random(f"{seed} {name}")

    def turn(self, turn: AgentTurn) -> list[int]:
        """Return the token ids of the next turn's prompt. If it is not longer than the last prompt with its
        answer, all of its tokens are new."""
        if turn.hash_ids:
            blocks = (self._block(f"block {id}", TRACE_BLOCK) for id in turn.hash_ids)
            self.token_ids = [id for block in blocks for id in block][: turn.prompt_len]
            return self.token_ids
        if turn.prompt_len <= len(self.token_ids):
            self.token_ids = []
        if not self.token_ids:
            self.token_ids = self._block("shared", min(self._shared_len, turn.prompt_len))
        num_new = turn.prompt_len - len(self.token_ids)
        self.token_ids = self.token_ids + self._draw.choices(range(self._vocab), k=num_new)
        return self.token_ids

    def answer(self, token_ids: Sequence[int]) -> None:
        """Append the token ids of the answer to the last turn, so that the next prompt contains them."""
        self.token_ids = [*self.token_ids, *token_ids]

    def _block(self, name: str, length: int) -> list[int]:
        return random.Random(f"{self._seed} {name}").choices(range(self._vocab), k=length)


class PerfectCache:
    """A simulated prefix cache of unlimited size. No cache with the same block size can have more hits."""

    def __init__(self, block_size: int = 16) -> None:
        self._size = block_size
        self._seen: set[int] = set()

    def hit(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens in the longest prefix of a prompt that was added before; its last
        token never counts."""
        num_tokens = 0
        for key in self._keys(token_ids[:-1]):
            if key not in self._seen:
                break
            num_tokens += self._size
        return num_tokens

    def add(self, token_ids: Sequence[int]) -> None:
        self._seen.update(self._keys(token_ids))

    def _keys(self, token_ids: Sequence[int]) -> Iterator[int]:
        key, size = 0, self._size
        for start in range(0, len(token_ids) - size + 1, size):
            key = hash((key, *token_ids[start : start + size]))
            yield key


def longest(sessions: Sequence[AgentSession]) -> int:
    """Return the largest number of tokens of any prompt together with its answer."""
    return max(turn.prompt_len + turn.output_len for session in sessions for turn in session.turns)


def shape_of(args: argparse.Namespace) -> AgentShape:
    """Return the distribution of synthetic sessions that the flags describe."""
    for name in ("agent_pause_median", "agent_think_time", "agent_time_scale", "agent_tool_spread"):
        if getattr(args, name) < 0:
            raise ConfigError(f"{_flag(name)} {getattr(args, name):g} must be at least 0")
    for name in ("agent_first_len", "agent_scale", "agent_input_per_output", "agent_think_every"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{_flag(name)} {getattr(args, name):g} must be above 0")
    if args.agent_pause_p99 < args.agent_pause_median:
        raise ConfigError(
            f"--agent-pause-p99 {args.agent_pause_p99:g} must be at least --agent-pause-median"
            f" ({args.agent_pause_median:g})"
        )
    return AgentShape(
        turns=args.agent_turns,
        first_len=args.agent_first_len,
        last_len=args.agent_last_len,
        input_per_output=args.agent_input_per_output,
        tool_spread=args.agent_tool_spread,
        pause_median_s=args.agent_pause_median,
        pause_p99_s=args.agent_pause_p99,
        think_s=args.agent_think_time,
        think_every=args.agent_think_every,
        scale=args.agent_scale,
        time_scale=args.agent_time_scale,
    )


def sessions_of(args: argparse.Namespace) -> list[AgentSession]:
    """Return the sessions that the flags describe: those of the trace, or synthetic ones."""
    if args.agent_num_sessions < 1:
        raise ConfigError(f"--agent-num-sessions {args.agent_num_sessions} must be at least 1")
    shape = shape_of(args)
    if not args.dataset_path:
        return synthetic_sessions(args.agent_num_sessions, shape, seed=args.seed)
    path = Path(args.dataset_path)
    return trace_sessions(path, scale=shape.scale, time_scale=shape.time_scale)[: args.agent_num_sessions]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def first_fields(hint: str, name: str) -> dict[str, Any]:
    """Return the fields that tell the server the session `name` of a request, as `hint` selects: `session`,
    `key`, or no field."""
    return {"session": {"session_id": name}, "key": {"prompt_cache_key": name}}.get(hint, {})
