"""Refusal of requests whose first token would come much later than their target."""

import math
from collections.abc import Iterable

from quire.data.request import Request
from quire.errors import TooMany
from quire.frontend.engine_link import EngineLink


def check_expected_wait(request: Request, links: Iterable[EngineLink], max_wait: float) -> None:
    """Raise TooMany if the first token of a request is expected later than `max_wait` times its target on all
    cores. A request without a target is never refused."""
    target_s = request.target.ttft_s
    waits = [_expected_s(request, link) for link in links if link.core is not None]
    if not target_s or not max_wait or not waits or min(waits) <= max_wait * target_s:
        return
    wait_s = min(waits)
    retry_s = max(1, math.ceil(wait_s - target_s))
    raise TooMany(
        f"The first token is expected in {wait_s:.1f} s, and its target is {target_s:g} s (slo_ttft_ms). "
        f"Above {max_wait:g} times the target (slo_max_wait) requests are refused. Try again in {retry_s} s.",
        retry_s,
    )


def _expected_s(request: Request, link: EngineLink) -> float:
    backlog = link.stats.backlog
    num_tokens = len(request.tokens) + link.num_unreported
    return 0.0 if backlog is None else backlog.wait_s(request.tenant, request.priority, num_tokens)
