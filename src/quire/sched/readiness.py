"""Admission checks that a request may have to wait for, and the queue that skips requests held by one."""

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from quire.data.request import Request
from quire.sched.queues import WaitingQueue


class AdmissionCheck(Protocol):
    """Something that requests may have to wait for before they get a row: a grammar, a LoRA adapter."""

    opened: bool
    """Whether a held request may be admissible now; set by the check and reset by `Gates.take_opened`."""

    @property
    def coming(self) -> Collection[Future[Any]]:
        """Return the futures that the check waits for."""

    def add(self, request: Request) -> None:
        """Add a request that has arrived and waits."""

    def holds(self, request: Request, *, alone: bool = False) -> bool:
        """Whether the request cannot be admitted now. With `alone`, no other request runs or is admitted."""

    def enter(self, request: Request) -> None:
        """Record that the request gets a row."""

    def leave(self, request: Request) -> None:
        """Record that the request has lost its row. It waits again unless it is dropped."""

    def drop(self, request: Request) -> None:
        """Remove a request that has ended."""

    def settle(self) -> dict[str, str | None]:
        """Collect what has become ready. Return the requests that failed, with a message if the client is at
        fault."""


class Gates:
    """All admission checks as one."""

    def __init__(self, *gates: AdmissionCheck) -> None:
        self._gates = gates

    def add(self, request: Request) -> None:
        for gate in self._gates:
            gate.add(request)

    def holds(self, request: Request, *, alone: bool = False) -> bool:
        return any(gate.holds(request, alone=alone) for gate in self._gates)

    def enter(self, request: Request) -> None:
        for gate in self._gates:
            gate.enter(request)

    def leave(self, request: Request) -> None:
        for gate in self._gates:
            gate.leave(request)

    def drop(self, request: Request) -> None:
        for gate in self._gates:
            gate.drop(request)

    def settle(self) -> dict[str, str | None]:
        return {id: message for gate in self._gates for id, message in gate.settle().items()}

    @property
    def is_awaiting(self) -> bool:
        """Whether a check waits for something that requests need."""
        return any(gate.coming for gate in self._gates)

    def wait(self, timeout_s: float) -> bool:
        """Wait until something is ready; return False on a timeout."""
        coming = [future for gate in self._gates for future in gate.coming]
        return bool(coming) and bool(wait(coming, timeout_s, FIRST_COMPLETED).done)

    def take_opened(self) -> bool:
        """Return whether a check has opened since the last call."""
        opened = any(gate.opened for gate in self._gates)
        for gate in self._gates:
            gate.opened = False
        return opened


class GatedLine:
    """A waiting queue that returns the first request that no check holds. Held requests keep their place.

    They are checked again when a check has opened, not in every step: there may be thousands."""

    def __init__(self, line: WaitingQueue, gates: Gates) -> None:
        self._line = line
        self._gates = gates
        self._held: dict[str, Request] = {}
        """Held requests in queue order; all others are behind them."""

    def next(self) -> Request | None:
        """Return the next admissible request; it stays in the queue until `pop`."""
        if self._held and self._gates.take_opened():
            self._put_back()
        while len(self._line):
            request = self._line.peek()
            if not self._gates.holds(request):
                return request
            self._held[request.id] = self._line.pop()
        return None

    def pop(self) -> Request:
        """Remove and return the request that `next` has returned."""
        return self._line.pop()

    def push(self, request: Request) -> None:
        self._line.push(request)

    def push_front(self, request: Request) -> None:
        self._put_back()
        self._line.push_front(request)

    def remove(self, request: Request) -> None:
        if self._held.pop(request.id, None) is None:
            self._line.remove(request)

    def _put_back(self) -> None:
        for request in reversed(self._held.values()):
            self._line.push_front(request)
        self._held.clear()

    @property
    def num_held(self) -> int:
        """Return the number of requests skipped when the queue was last examined."""
        return len(self._held)

    def __len__(self) -> int:
        return len(self._line) + len(self._held)
