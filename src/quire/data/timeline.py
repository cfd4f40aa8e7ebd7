"""Where the time of a request went."""

from collections.abc import Iterable

import msgspec

from quire.data.outputs import RequestStateStats


class RequestTimeline(msgspec.Struct):
    """The time of a request, from arrival to end, as it is told to users."""

    total_ms: float
    queue_ms: float
    """In the scheduler's line, before it first ran."""
    prefill_ms: float
    """From then to its first token."""
    decode_ms: float
    """From its first token to its last."""
    preempted_ms: float
    """Of prefill and decode: without its row, which another took. Of all sequences together."""
    num_preemptions: int
    cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    step_share_ms: float
    """What its tokens took of the steps that they were in, which others shared."""
    draft_tokens: int = 0
    """That were guessed ahead,"""
    accepted_tokens: int = 0
    """and those of them that held."""

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
        )

    @classmethod
    def joined(cls, parts: Iterable["RequestTimeline"]) -> "RequestTimeline":
        """Of requests that ran side by side: the longest of each wait, the sum of what they had."""
        first, *others = parts
        for each in others:
            first = cls(
                max(first.total_ms, each.total_ms),
                max(first.queue_ms, each.queue_ms),
                max(first.prefill_ms, each.prefill_ms),
                max(first.decode_ms, each.decode_ms),
                first.preempted_ms + each.preempted_ms,
                first.num_preemptions + each.num_preemptions,
                first.cached_tokens + each.cached_tokens,
                first.step_share_ms + each.step_share_ms,
                first.draft_tokens + each.draft_tokens,
                first.accepted_tokens + each.accepted_tokens,
            )
        return first


def _between(start: float, end: float) -> float:
    """0 where it never came to one of them."""
    return _ms(end - start) if start and end else 0.0


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e3, 3)
