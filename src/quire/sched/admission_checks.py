"""Admission checks, which hold waiting requests back, and the queue that skips the held requests."""

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from quire.data.request import Request
from quire.sched.queues import WaitingQueue


class AdmissionCheck(Protocol):
    """A condition that requests may have to wait for before they get a row (run): a compiled grammar, a
    loaded LoRA adapter, or KV blocks from lower tiers."""

    needs_recheck: bool
    """Whether a request that this check holds back may be admissible now. The check sets it, and
    `AdmissionChecks.take_needs_recheck` resets it."""

    @property
    def futures(self) -> Collection[Future[Any]]:
        """Return the futures that the check waits for."""

    def add(self, request: Request) -> None:
        """Add a request that has arrived and waits."""

    def hold_back(self, request: Request, *, alone: bool = False) -> bool:
        """Hold the request back if it cannot be admitted now, and return whether it is held back. The check
        may begin what the request needs, such as a copy of its KV blocks. With `alone`, no other request runs
        or is admitted."""

    def enter(self, request: Request) -> None:
        """Record that the request gets a row, which means that it runs."""

    def leave(self, request: Request) -> None:
        """Record that the request has lost its row. It waits again unless it is dropped."""

    def drop(self, request: Request) -> None:
        """Remove a request that has ended."""

    def settle(self) -> dict[str, str | None]:
        """Collect the results of finished futures, so that requests may become admissible. Return the ids of
        requests that failed, each with a message if the client is at fault, else None."""


class AdmissionChecks:
    """Combines all admission checks into one."""

    def __init__(self, *checks: AdmissionCheck) -> None:
        self._checks = checks

    def add(self, request: Request) -> None:
        for check in self._checks:
            check.add(request)

    def hold_back(self, request: Request, *, alone: bool = False) -> bool:
        return any(check.hold_back(request, alone=alone) for check in self._checks)

    def enter(self, request: Request) -> None:
        for check in self._checks:
            check.enter(request)

    def leave(self, request: Request) -> None:
        for check in self._checks:
            check.leave(request)

    def drop(self, request: Request) -> None:
        for check in self._checks:
            check.drop(request)

    def settle(self) -> dict[str, str | None]:
        return {id: message for check in self._checks for id, message in check.settle().items()}

    @property
    def is_awaiting(self) -> bool:
        """Whether a check waits for a future that requests need."""
        return any(check.futures for check in self._checks)

    def wait(self, timeout_s: float) -> bool:
        """Wait until one of the futures is done; return False on a timeout or without futures."""
        futures = [future for check in self._checks for future in check.futures]
        return bool(futures) and bool(wait(futures, timeout_s, FIRST_COMPLETED).done)

    def take_needs_recheck(self) -> bool:
        """Return whether a held request may have become admissible since the last call, and reset this
        flag."""
        needs_recheck = any(check.needs_recheck for check in self._checks)
        for check in self._checks:
            check.needs_recheck = False
        return needs_recheck


class ReadyQueue:
    """A waiting queue that returns the first request that no check holds. Held requests keep their place.

    Held requests are checked again only when `needs_recheck` is set: there may be thousands."""

    def __init__(self, queue: WaitingQueue, checks: AdmissionChecks) -> None:
        self._queue = queue
        self._checks = checks
        self._held: dict[str, Request] = {}
        """Held requests in queue order; all other requests are behind them."""

    def next(self) -> Request | None:
        """Return the next admissible request; it stays in the queue until `pop`."""
        if self._held and self._checks.take_needs_recheck():
            self._put_back()
        while len(self._queue):
            request = self._queue.peek()
            if not self._checks.hold_back(request):
                return request
            self._held[request.id] = self._queue.pop()
        return None

    def pop(self) -> Request:
        """Remove and return the request that `next` has returned."""
        return self._queue.pop()

    def push(self, request: Request) -> None:
        self._queue.push(request)

    def push_front(self, request: Request) -> None:
        self._put_back()
        self._queue.push_front(request)

    def remove(self, request: Request) -> None:
        if self._held.pop(request.id, None) is None:
            self._queue.remove(request)

    def _put_back(self) -> None:
        for request in reversed(self._held.values()):
            self._queue.push_front(request)
        self._held.clear()

    @property
    def num_held(self) -> int:
        """Return the number of requests skipped when the queue was last examined."""
        return len(self._held)

    def __len__(self) -> int:
        return len(self._queue) + len(self._held)
