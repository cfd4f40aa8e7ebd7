"""Fault isolation: finds the request that made a step fail."""

from collections import OrderedDict

from quire.data.request import Request
from quire.sched.limits import StepLimits


class FaultIsolation:
    """The requests of a failed step, each of which may have caused the failure. They run alone, one by one,
    until each has a new token. A request that fails alone, even with few tokens, is at fault. If no request
    fails alone, the batch was too large."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.suspects: OrderedDict[str, Request] = OrderedDict()
        """Suspects by request id, the next to be tried first. A suspect that has no row is also in the
        waiting queue."""
        self._failed: tuple[int, int] | None = None
        """Rows and tokens of the failed step, until its cause is found."""

    def __bool__(self) -> bool:
        return bool(self.suspects)

    @property
    def next_suspect(self) -> Request:
        return next(iter(self.suspects.values()))

    def isolate(self, requests: list[Request], num_rows: int, num_tokens: int) -> None:
        """Start the isolation after a step of several requests failed; `requests` are those that have not
        ended."""
        self.suspects |= {request.id: request for request in requests}
        self._failed = (num_rows, num_tokens) if requests else None

    def is_at_fault(self, request: Request, num_tokens: int) -> bool:
        """Whether a request is at fault after a step with this request alone failed. If fewer tokens can be
        tried, the request stays a suspect instead."""
        if not self.limits.try_fewer_tokens(num_tokens):
            return True
        self.suspects[request.id] = request
        self.suspects.move_to_end(request.id, last=False)
        return False

    def remove(self, request: Request, reason: str) -> None:
        """Remove a suspect (a request of the failed step) that has a new token (`reason` is then "passed"),
        or that has ended for `reason`."""
        if request.id not in self.suspects:
            return
        tried = self.next_suspect is request and self.limits.end_retry(
            passed=reason not in ("abort", "error")
        )
        del self.suspects[request.id]
        if tried or reason == "error":
            self._failed = None
        if not self.suspects and self._failed is not None:
            self.limits.shrink(*self._failed)
            self._failed = None
