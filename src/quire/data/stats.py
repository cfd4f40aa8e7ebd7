"""Numbers about the engine and its requests: what metrics and log lines are made of."""

from dataclasses import dataclass, field

import msgspec

from quire.data.params import SamplingParams


class StepStats(msgspec.Struct):
    """The engine after a step; what metrics and the log line are made of."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    """Of these, the ones that wait for something of their own: a grammar, an adapter."""
    kv_usage: float = 0.0
    sleep_level: int = 0
    num_computed_tokens: int = 0
    """Tokens that went through the model in this step."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that got their first token, cached ones counted in."""
    num_cached_tokens: int = 0
    """Of these, tokens that the prefix cache held."""
    num_sampled_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, counted when a request is first admitted."""
    prefix_hits: int = 0
    num_preempted: int = 0
    num_drafts: int = 0
    """Rows that had drafts in this step."""
    num_draft_tokens: int = 0
    held_by_place: list[int] = []
    """Of those rows: how many kept their first draft, their second, ..."""
    running_adapters: list[str] = []
    """Names of those that requests run with,"""
    waiting_adapters: list[str] = []
    """and of those that requests wait for."""


@dataclass(slots=True)
class SequenceTimes:
    """When a sequence passed its stations, monotonic seconds; 0.0 where it never came. How long it had to
    make way, and what it took of the steps."""

    queued_at: float = 0.0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    preempted_s: float = 0.0
    num_preemptions: int = 0
    step_share_s: float = 0.0
    """Of a sequence that is timed."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_held: int = 0
    """Of those."""


@dataclass(slots=True)
class FinishedSequence:
    """The facts of a sequence that ended, for the metrics."""

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached: int
    longest: int | None
    """Most tokens of any sequence of the request, set on the last of them to end."""
    params: SamplingParams
    arrived_at: float
    times: SequenceTimes


@dataclass(slots=True)
class FrontStats:
    """What a step meant to the requests, seen from the front."""

    num_tokens: int = 0
    """Tokens that reached a request; those computed behind a stop string do not."""
    first_token_s: list[float] = field(default_factory=list)
    """From arrival to first token, of the requests that got theirs."""
    between_tokens_s: list[float] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
