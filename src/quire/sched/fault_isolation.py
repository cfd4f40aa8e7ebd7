"""What follows a step that failed: who or what is at fault."""

from collections import OrderedDict

from quire.data.request import Request
from quire.sched.limits import StepLimits


class FaultIsolation:
    """The requests of a failed step, which run alone, one by one, until each has a token of its own.

    Who fails alone is at fault, if it does so with few tokens, too. If nobody fails the batch was too large.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.suspects: OrderedDict[str, Request] = OrderedDict()
        """By id, the one whose turn it is first. While they do not run they stand in the line, too."""
        self._failed: tuple[int, int] | None = None
        """Rows and tokens of the step that nothing explains yet."""

    def __bool__(self) -> bool:
        return bool(self.suspects)

    @property
    def first(self) -> Request:
        return next(iter(self.suspects.values()))

    def open(self, requests: list[Request], num_rows: int, num_tokens: int) -> None:
        """A step of several failed; `requests` are those of them that are still here."""
        self.suspects |= {request.id: request for request in requests}
        self._failed = (num_rows, num_tokens) if requests else None

    def is_guilty(self, request: Request, num_tokens: int) -> bool:
        """A step of one failed. Not guilty yet if it may be tried again with fewer tokens."""
        if not self.limits.try_fewer_tokens(num_tokens):
            return True
        self.suspects[request.id] = request
        self.suspects.move_to_end(request.id, last=False)
        return False

    def leave(self, request: Request, reason: str) -> None:
        """A request has a token of its own, or has ended."""
        if request.id not in self.suspects:
            return
        tried = self.first is request and self.limits.settle(passed=reason not in ("abort", "error"))
        del self.suspects[request.id]
        if tried or reason == "error":
            self._failed = None
        if not self.suspects and self._failed is not None:
            self.limits.shrink(*self._failed)
            self._failed = None
