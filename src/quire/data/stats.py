"""Statistics of the engine and its requests, for metrics and log lines."""

from dataclasses import dataclass, field

import msgspec

from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.params import SamplingParams
from quire.registry import LazyTable

SLO_RESULTS = ("good", "late_first_token", "slow_tokens", "late_and_slow", "refused")
"""Results of requests with latency targets. `slow_tokens`: the mean time per token after the first was above
the target."""
STAT_LOGGERS = LazyTable("stat logger", {})
"""Functions of plugins that receive the `IntervalStats` of an engine core."""


class TierStats(msgspec.Struct, omit_defaults=True):
    """Copies between the KV cache and its lower tiers since the last report."""

    store_sizes: list[int] = []
    """Bytes of each copy to lower tiers."""
    load_sizes: list[int] = []
    """Bytes of each copy to the device."""
    load_s: float = 0.0
    store_s: float = 0.0
    """Seconds that the ended copies to host memory took."""
    disk_bytes: int = 0
    """Bytes that were read from disk."""
    disk_read_s: float = 0.0
    disk_written_bytes: int = 0
    """Bytes that were written to disk."""
    disk_write_s: float = 0.0
    num_lost_writes: int = 0
    """Number of KV blocks that were not written to disk."""
    disk_queries: int = 0
    """Number of blocks of admitted prompts that were neither cached on the device nor in host memory."""
    disk_hits: int = 0
    """Number of the blocks in `disk_queries` that came from disk."""
    lookup_s: list[float] = []
    """Seconds of each lookup of a request in the tiers."""
    host_read_share: float = 0.0
    host_write_share: float = 0.0
    """Shares of the blocks in host memory that copies under way read and fill."""
    num_failed_stores: int = 0
    """Number of KV blocks that were not copied to a lower tier, because no slot was free there."""
    num_failed_loads: int = 0
    """Number of KV blocks that could not be read."""
    num_queries: int = 0
    """Number of prompt tokens of admitted requests that were not cached on the device."""
    num_hits: int = 0
    """Number of prompt tokens that were loaded from a lower tier, or from another engine."""
    transfer_s: list[float] = []
    """Seconds of each copy from another engine."""
    transfer_bytes: list[int] = []
    transfer_entries: list[int] = []
    """Number of KV blocks and checkpoints of SSM states of each copy from another engine."""
    num_failed_transfers: int = 0
    """Number of requests with a prefix that could not be loaded from another engine."""
    num_failed_releases: int = 0
    """Number of prefixes for which the request to release them did not reach the other engine."""
    num_expired_offers: int = 0
    """Number of prefixes that were kept for another engine and not read in time."""


class Backlog(msgspec.Struct):
    """Prompt tokens that an engine core has still to compute, for an estimate of the time to a first
    token."""

    rate: float = 0.0
    """Prompt tokens that the core computes per second; 0: not known yet."""
    tokens: list[tuple[int, int, int]] = []
    """(Tenant, priority, number of prompt tokens), one entry for each tenant and priority. The tenant is 0
    unless tokens are shared by API key, and the priority is 0 unless requests are ordered by it."""

    def wait_s(self, tenant: int, priority: int, num_tokens: int) -> float:
        """Return the expected seconds until a new prompt of `num_tokens` is computed; 0 if that is not
        known."""
        if not self.rate:
            return 0.0
        ahead = [(owner, count) for owner, value, count in self.tokens if value <= priority]
        total = sum(count for _, count in ahead)
        if tenant:
            num_tenants = len({tenant, *(owner for owner, _ in ahead)})
            total = min(total, num_tenants * sum(count for owner, count in ahead if owner == tenant))
        return (total + num_tokens) / self.rate


class StepStats(msgspec.Struct):
    """Statistics of the engine after a step, for metrics and the log line."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    """Number of waiting requests that wait for a grammar or a LoRA adapter."""
    kv_usage: float = 0.0
    sleep_level: int = 0
    num_computed_tokens: int = 0
    """Number of tokens that the model computed in this step."""
    num_prompt_tokens: int = 0
    """Number of prompt tokens, cached tokens included, of the requests that got their first token."""
    num_cached_tokens: int = 0
    """Number of `num_prompt_tokens` that were found in the prefix cache."""
    num_loaded_tokens: int = 0
    """Number of `num_cached_tokens` that came from a lower tier of the KV cache, or another engine."""
    num_sampled_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, counted when a request is first admitted."""
    prefix_hits: int = 0
    misses: list[str] = []
    """Reasons of prefix cache misses, of the requests that were first admitted with a miss."""
    num_preempted: int = 0
    num_drafts: int = 0
    """Number of sequences with draft tokens in this step."""
    num_draft_tokens: int = 0
    num_accepted_by_position: list[int] = []
    """Number of sequences in this step that accepted their first draft token, their second, ..."""
    running_adapters: list[str] = []
    """Names of LoRA adapters of running requests."""
    waiting_adapters: list[str] = []
    """Names of LoRA adapters of waiting requests."""
    tiers: TierStats | None = None
    """Copies to and from lower tiers of the KV cache; None without lower tiers."""
    num_dropped_events: int = 0
    """Number of batches of KV events that were dropped because the queue was full."""
    weight_version: str = ""
    backlog: Backlog | None = None
    """Prompt tokens that are still to be computed; None without latency targets."""


@dataclass(frozen=True, slots=True)
class IntervalStats:
    """Statistics of one engine core over the last interval, as in its log line."""

    engine: int
    """Data-parallel rank."""
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    num_running: int
    num_waiting: int
    kv_usage: float
    """Used share of the KV cache, 0 to 1."""
    prefix_hit_rate: float
    """Share of looked up prompt tokens that were in the prefix cache, 0 to 1, over the last 1,000 steps with
    lookups."""
    num_preemptions: int
    """Number of preemptions since the start."""


@dataclass(slots=True)
class SequenceTimes:
    """Times of a sequence in monotonic seconds (0.0: not reached), and its preemptions, step share and draft
    tokens."""

    queued_at: float = 0.0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    preempted_s: float = 0.0
    num_preemptions: int = 0
    step_share_s: float = 0.0
    """The sequence's share of the duration of its steps in seconds; 0 unless the sequence is timed."""
    num_from_host: int = 0
    """Cached prompt tokens that were loaded from host memory."""
    num_from_disk: int = 0
    """Cached prompt tokens that were loaded from disk."""
    num_from_remote: int = 0
    """Cached prompt tokens that were loaded from another engine."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    """Accepted draft tokens."""


@dataclass(slots=True)
class FinishedSequence:
    """Facts of a finished sequence, for the metrics."""

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached: int
    longest: int | None
    """Largest number of output tokens of any sequence of the request; None except for the last to end."""
    params: SamplingParams
    arrived_at: float
    times: SequenceTimes
    target: LatencyTarget = NO_TARGET

    @property
    def slo_result(self) -> str:
        """Return which of its latency targets the sequence has met, as the metric `slo_requests` names it; an
        empty string without targets or without output."""
        times, target = self.times, self.target
        if not target or not self.num_output_tokens:
            return ""
        first_s = times.first_token_at - times.queued_at
        mean_s = (times.last_token_at - times.first_token_at) / max(self.num_output_tokens - 1, 1)
        is_late, is_slow = 0 < target.ttft_s < first_s, 0 < target.itl_s < mean_s
        return SLO_RESULTS[is_late + 2 * is_slow]


@dataclass(slots=True)
class FrontStats:
    """Statistics of the API server process for one or more steps: delivered tokens, latencies and finished
    sequences."""

    num_tokens: int = 0
    """Number of delivered tokens; tokens computed after a stop string are not delivered."""
    first_token_s: list[float] = field(default_factory=list)
    """Seconds from arrival to the first token, for each request that got its first token."""
    between_tokens_s: list[float] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
