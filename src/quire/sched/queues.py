"""Waiting queues: one class per scheduling policy, and a fair one over several queues.

The entry of a removed request stays in its queue until it reaches the front, or until such stale entries
outnumber the others. So the time of an operation does not grow with the queue, except for the logarithm of a
heap. A request that enters again gets a new entry, which differs from its stale one."""

import heapq
import math
import time
from collections.abc import Callable
from typing import Protocol

from quire.data.request import Request
from quire.sched.fairness import FairShare
from quire.sched.targets import Targets

_SAME_S = 1e-3
"""Times that differ by less than this number of seconds are treated as equal."""

Entry = tuple[int, float, int, Request]
"""Entry of a heap: the two parts of a request's rank, its place among equal ranks, and the request."""


class WaitingQueue(Protocol):
    """The waiting requests in the order of admission. A request is in it at most once."""

    def push(self, request: Request) -> None: ...
    def push_front(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...


class PriorityQueue:
    """A waiting queue ordered by priority value, lowest first, then by time of arrival."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[str, Entry] = {}
        self._last = self._first = 0

    def push(self, request: Request) -> None:
        self._last += 1
        self._enter(request, self._last)

    def push_front(self, request: Request) -> None:
        self._first -= 1
        self._enter(request, self._first)

    def _enter(self, request: Request, place: int) -> None:
        entry = self._live[request.id] = (*self._rank(request), place, request)
        heapq.heappush(self._heap, entry)

    def _rank(self, request: Request) -> tuple[int, float]:
        """Return the sort key of a request: its priority and a time. The lowest key is first."""
        return request.priority, request.arrived_at

    def peek(self) -> Request:
        return self._first_live()

    def _first_live(self) -> Request:
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        """Remove and return the request that the last `peek` has returned."""
        request = self._first_live()
        heapq.heappop(self._heap)
        del self._live[request.id]
        return request

    def remove(self, request: Request) -> None:
        del self._live[request.id]
        if len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: Entry) -> bool:
        return self._live.get(entry[-1].id) is entry

    def __len__(self) -> int:
        return len(self._live)


class FcfsQueue(PriorityQueue):
    """First come, first served: all requests have the same rank. A request that has run, here or in an engine
    core that died, goes to the front."""

    def push(self, request: Request) -> None:
        if request.has_run:
            self.push_front(request)
        else:
            super().push(request)

    def _rank(self, request: Request) -> tuple[int, float]:
        return 0, 0.0


class TargetQueue(PriorityQueue):
    """Waiting requests in the order in which their prompts must start to meet their targets. With
    `by_priority`, a lower priority value comes first. A request that has run precedes all others of its
    priority."""

    def __init__(self, targets: Targets, *, by_priority: bool) -> None:
        super().__init__()
        self._targets, self._by_priority = targets, by_priority

    def _rank(self, request: Request) -> tuple[int, float]:
        due = -math.inf if request.has_run else self._targets.due(request, time.monotonic())
        return request.priority if self._by_priority else 0, due

    def peek(self) -> Request:
        while True:
            request = self._first_live()
            if self._rank(request)[1] <= self._heap[0][1] + _SAME_S:
                return request
            heapq.heappop(self._heap)  # the target was missed, or the estimated cost has fallen
            self.push(request)


QUEUE_CLASSES: dict[str, type[PriorityQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}


class FairQueue:
    """A queue per tenant (API key), made by `make_queue`. The next request is the first of the tenant with
    the lowest level, which is its number of computed tokens divided by its weight."""

    def __init__(self, make_queue: Callable[[], WaitingQueue], shares: FairShare) -> None:
        self._make_queue = make_queue
        self._shares = shares
        self._queues: dict[int, WaitingQueue] = {}
        """Queues of the tenants with waiting requests."""

    def push(self, request: Request) -> None:
        if request.tenant not in self._queues:
            self._shares.enter(request, self._queues)
        self._queue_of(request).push(request)

    def push_front(self, request: Request) -> None:
        """Insert a request that was in the queue before, without changing its tenant's level."""
        self._queue_of(request).push_front(request)

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self._queues.setdefault(request.tenant, self._make_queue())

    def peek(self) -> Request:
        return self._queues[self._shares.lowest_tenant(self._queues)].peek()

    def pop(self) -> Request:
        tenant = self._shares.lowest_tenant(self._queues)
        request = self._queues[tenant].pop()
        self._drop_if_empty(tenant)
        return request

    def remove(self, request: Request) -> None:
        self._queues[request.tenant].remove(request)
        self._drop_if_empty(request.tenant)

    def _drop_if_empty(self, tenant: int) -> None:
        if not len(self._queues[tenant]):
            del self._queues[tenant]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


def open_queue(policy: str, shares: FairShare | None, targets: Targets | None) -> WaitingQueue:
    """Return the waiting queue of a policy, divided by tenant with `shares` and ordered by `targets` if
    given."""

    def make() -> WaitingQueue:
        if targets is not None:
            return TargetQueue(targets, by_priority=policy == "priority")
        return QUEUE_CLASSES[policy]()

    return make() if shares is None else FairQueue(make, shares)
