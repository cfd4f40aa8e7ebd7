"""Stat loggers with vLLM's interface: objects of plugins that get the statistics of steps and requests."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.data.stats import FinishedSequence, FrontStats, StepStats
from quire.errors import one_line
from quire.logs import get_logger

log = get_logger(__name__)

Observer = Callable[[int, StepStats | None, FrontStats | None], None]
"""Function that gets the statistics of each step of a rank, and those of delivered outputs."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens of newly admitted requests that were looked up and found in the prefix cache."""

    queries: int = 0
    hits: int = 0


@dataclass(slots=True)
class SpecDecodingStats:
    """Draft tokens of a step."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]


@dataclass(slots=True)
class SchedulerStats:
    """Statistics of a step, or of an idle engine."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    """Used share of the KV cache, 0 to 1."""
    prefix_cache_stats: PrefixCacheStats
    spec_decoding_stats: SpecDecodingStats | None
    """None if the step had no draft tokens."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preempted_reqs: int

    @classmethod
    def of(cls, stats: StepStats) -> "SchedulerStats":
        per_position, drafts = stats.num_accepted_by_position, None
        if stats.num_drafts:
            drafts = SpecDecodingStats(
                num_drafts=stats.num_drafts,
                num_draft_tokens=stats.num_draft_tokens,
                num_accepted_tokens=sum(per_position),
                num_accepted_tokens_per_pos=list(per_position),
            )
        return cls(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            kv_cache_usage=stats.kv_usage,
            prefix_cache_stats=PrefixCacheStats(stats.prefix_queries, stats.prefix_hits),
            spec_decoding_stats=drafts,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_preempted_reqs=stats.num_preempted,
        )


@dataclass(slots=True)
class FinishedRequestStats:
    """Facts of a finished sequence; times are in seconds, and 0 for a sequence without output."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    max_tokens_param: int | None
    e2e_latency: float
    queued_time: float
    prefill_time: float
    decode_time: float
    inference_time: float
    mean_time_per_output_token: float

    @classmethod
    def of(cls, ended: FinishedSequence) -> "FinishedRequestStats":
        times, num_tokens = ended.times, ended.num_output_tokens
        decode_s = times.last_token_at - times.first_token_at
        return cls(
            finish_reason=ended.reason,
            num_prompt_tokens=ended.num_prompt_tokens,
            num_generation_tokens=num_tokens,
            num_cached_tokens=ended.num_cached,
            max_tokens_param=ended.params.max_tokens,
            e2e_latency=time.time() - ended.arrived_at,
            queued_time=times.scheduled_at - times.queued_at if num_tokens else 0.0,
            prefill_time=times.first_token_at - times.scheduled_at if num_tokens else 0.0,
            decode_time=decode_s if num_tokens else 0.0,
            inference_time=times.last_token_at - times.scheduled_at if num_tokens else 0.0,
            mean_time_per_output_token=decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0,
        )


@dataclass(slots=True)
class IterationStats:
    """Statistics of delivered outputs."""

    num_generation_tokens: int
    time_to_first_tokens_iter: list[float]
    inter_token_latencies_iter: list[float]
    finished_requests: list[FinishedRequestStats]
    iteration_timestamp: float = field(default_factory=time.time)

    @classmethod
    def of(cls, front: FrontStats) -> "IterationStats":
        return cls(
            num_generation_tokens=front.num_tokens,
            time_to_first_tokens_iter=list(front.first_token_s),
            inter_token_latencies_iter=list(front.between_tokens_s),
            finished_requests=[FinishedRequestStats.of(ended) for ended in front.finished],
        )


class StatLoggerBase:
    """Base of stat loggers with vLLM's interface."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """Build the logger of the engine core with this data parallel rank."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the statistics of a step, or of delivered outputs. The other argument is None."""

    def log_engine_initialized(self) -> None:
        """Take notice that the engine starts."""

    def log(self) -> None:
        """Log the statistics since the last call."""


class StatLoggers:
    """Passes the statistics of an engine to its stat loggers. A logger that raises is not called again."""

    def __init__(
        self,
        factories: Mapping[str, Callable[[Any, int], Any]],
        vllm_config: Any,
        ranks: Iterable[int],
        interval_s: float,
    ) -> None:
        """Build a logger for each rank by each of the `factories`; `log` is called every `interval_s`
        seconds."""
        self._interval_s, self._logged_at = interval_s, time.monotonic()
        self._loggers: dict[tuple[str, int], Any] = {}
        for name, make in factories.items():
            for rank in ranks:
                try:
                    self._loggers[name, rank] = make(vllm_config, rank)
                except Exception as error:  # code of the operator, which may raise anything
                    log.error("The stat logger %r cannot be built: %s", name, one_line(error))
        self._call("log_engine_initialized")

    def __call__(self, rank: int, stats: StepStats | None, front: FrontStats | None) -> None:
        """Pass the statistics of a step, or of delivered outputs."""
        scheduler = None if stats is None else SchedulerStats.of(stats)
        self._call("record", rank, scheduler, None if front is None else IterationStats.of(front))
        if time.monotonic() - self._logged_at >= self._interval_s:
            self._logged_at = time.monotonic()
            self._call("log")

    def _call(self, method: str, rank: int | None = None, *args: Any) -> None:
        for key, logger in list(self._loggers.items()):
            if rank not in (None, key[1]):
                continue
            try:
                getattr(logger, method)(*args, **({} if rank is None else {"engine_idx": rank}))
            except Exception as error:  # code of the operator, which may raise anything
                del self._loggers[key]
                log.error("The stat logger %r failed and is left out: %s", key[0], one_line(error))
