"""Timeline of a request, as reported to users."""

from collections.abc import Iterable

import msgspec

from quire.data.outputs import RequestStateStats
from quire.data.prefix_miss import PrefixMiss


class RequestTimeline(msgspec.Struct):
    """Times of a request from arrival to end, as reported to users."""

    total_ms: float
    queue_ms: float
    """Time in the queue before the request was first scheduled."""
    prefill_ms: float
    """Time from the first scheduling to the first token."""
    decode_ms: float
    """Time from the first to the last token."""
    preempted_ms: float
    """Part of prefill and decode for which the request was preempted; the sum over all sequences."""
    num_preemptions: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    step_share_ms: float
    """The request's share of the duration of its steps, in proportion to its tokens."""
    draft_tokens: int = 0
    """Number of proposed draft tokens."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    cached_tokens_from_host: int = 0
    """Cached tokens that were copied from host memory."""
    cached_tokens_from_disk: int = 0
    """Cached tokens that were read from disk."""
    cache_miss: PrefixMiss | None = None
    """Reason for which a part of the prompt was not in the prefix cache; None if everything cacheable was."""

    @classmethod
    def of(cls, stats: RequestStateStats, num_cached: int) -> "RequestTimeline":
        return cls(
            total_ms=_ms(stats.latency),
            queue_ms=_between(stats.queued_ts, stats.scheduled_ts),
            prefill_ms=_between(stats.scheduled_ts, stats.first_token_ts),
            decode_ms=_between(stats.first_token_ts, stats.last_token_ts),
            preempted_ms=_ms(stats.preempted_s),
            num_preemptions=stats.num_preemptions,
            cached_tokens=num_cached,
            step_share_ms=_ms(stats.step_share_s),
            draft_tokens=stats.num_draft_tokens,
            accepted_tokens=stats.num_accepted_tokens,
            cached_tokens_from_host=stats.num_from_host,
            cached_tokens_from_disk=stats.num_from_disk,
            cache_miss=stats.prefix_miss,
        )

    @classmethod
    def joined(cls, parts: Iterable["RequestTimeline"]) -> "RequestTimeline":
        """Merge the timelines of requests that ran at the same time: the maximum of each duration, the sum of
        counts, shares and preempted times, and the first cache miss."""
        first, *others = parts
        for other in others:
            first = cls(
                max(first.total_ms, other.total_ms),
                max(first.queue_ms, other.queue_ms),
                max(first.prefill_ms, other.prefill_ms),
                max(first.decode_ms, other.decode_ms),
                first.preempted_ms + other.preempted_ms,
                first.num_preemptions + other.num_preemptions,
                first.cached_tokens + other.cached_tokens,
                first.step_share_ms + other.step_share_ms,
                first.draft_tokens + other.draft_tokens,
                first.accepted_tokens + other.accepted_tokens,
                first.cached_tokens_from_host + other.cached_tokens_from_host,
                first.cached_tokens_from_disk + other.cached_tokens_from_disk,
                first.cache_miss or other.cache_miss,
            )
        return first


def _between(start: float, end: float) -> float:
    """Return the milliseconds between two times; 0 if the request did not reach one of them."""
    return _ms(end - start) if start and end else 0.0


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e3, 3)
