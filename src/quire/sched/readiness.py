"""Gates: what a request may have to wait for before it gets a row, and the line where others pass it by."""

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from quire.data.request import Request
from quire.sched.queues import WaitingQueue


class AdmissionCheck(Protocol):
    """Something that requests may have to wait for before they get a row: a grammar, an adapter."""

    opened: bool
    """Whether somebody whom it held may come in; set by the gate, and taken back by who has looked."""

    @property
    def coming(self) -> Collection[Future[Any]]:
        """What it waits for itself."""

    def add(self, request: Request) -> None:
        """It has come, and waits."""

    def holds(self, request: Request, *, alone: bool = False) -> bool:
        """Whether it cannot come in now; or, `alone`, if nobody else runs or is let in."""

    def enter(self, request: Request) -> None:
        """It gets a row."""

    def leave(self, request: Request) -> None:
        """It has lost its row, and waits again, unless it is dropped."""

    def drop(self, request: Request) -> None:
        """It has ended."""

    def settle(self) -> dict[str, str | None]:
        """Take in what has come. The requests that wait in vain, and why, if that is their own fault."""


class Gates:
    """All of them, as one."""

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
        return {id: why for gate in self._gates for id, why in gate.settle().items()}

    @property
    def is_awaiting(self) -> bool:
        """Whether something is on its way without which some cannot come in."""
        return any(gate.coming for gate in self._gates)

    def wait(self, timeout_s: float) -> bool:
        """Until something has come; False if nothing does in time."""
        coming = [future for gate in self._gates for future in gate.coming]
        return bool(coming) and bool(wait(coming, timeout_s, FIRST_COMPLETED).done)

    def take_opened(self) -> bool:
        """Whether one has opened since the last time."""
        opened = any(gate.opened for gate in self._gates)
        for gate in self._gates:
            gate.opened = False
        return opened


class GatedLine:
    """A waiting line whose next is the first whom no gate holds. Who is held keeps its place.

    It is looked at again when a gate has opened, not in every step: thousands may be held.
    """

    def __init__(self, line: WaitingQueue, gates: Gates) -> None:
        self._line = line
        self._gates = gates
        self._held: dict[str, Request] = {}
        """In the order of the line, all of which is behind them."""

    def next(self) -> Request | None:
        """It stays where it is until it is popped."""
        if self._held and self._gates.take_opened():
            self._put_back()
        while len(self._line):
            request = self._line.peek()
            if not self._gates.holds(request):
                return request
            self._held[request.id] = self._line.pop()
        return None

    def pop(self) -> Request:
        """What `next` has found."""
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
        """Those who were passed by when the line was last looked at."""
        return len(self._held)

    def __len__(self) -> int:
        return len(self._line) + len(self._held)
