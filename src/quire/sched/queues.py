"""The waiting line, one class per scheduling policy, and one over several lines.

Who is removed stays where it stood, dead, until it comes up or the dead outnumber the living: so no operation
costs more the longer the line is, but for the logarithm of a heap. A request that enters again gets a new
entry, which tells it from its dead one.
"""

import heapq
from collections import deque
from typing import Protocol

from quire.data.request import Request
from quire.sched.fairness import FairShare


class WaitingQueue(Protocol):
    """The requests that wait, in the order in which they come in. A request stands in it once."""

    def push(self, request: Request) -> None: ...
    def push_front(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...


class FcfsQueue:
    """First come, first served. A request that has run, here or in a core that died, stands at the front."""

    def __init__(self) -> None:
        self._line: deque[tuple[Request]] = deque()
        self._living: dict[str, tuple[Request]] = {}

    def push(self, request: Request) -> None:
        if request.has_run:
            self.push_front(request)
            return
        self._living[request.id] = entry = (request,)
        self._line.append(entry)

    def push_front(self, request: Request) -> None:
        self._living[request.id] = entry = (request,)
        self._line.appendleft(entry)

    def peek(self) -> Request:
        while not self._is_living(self._line[0]):
            self._line.popleft()
        return self._line[0][0]

    def pop(self) -> Request:
        request = self.peek()
        self._line.popleft()
        del self._living[request.id]
        return request

    def remove(self, request: Request) -> None:
        del self._living[request.id]
        if len(self._line) > 2 * len(self._living):
            self._line = deque(entry for entry in self._line if self._is_living(entry))

    def _is_living(self, entry: tuple[Request]) -> bool:
        return self._living.get(entry[0].id) is entry

    def __len__(self) -> int:
        return len(self._living)


class PriorityQueue:
    """Lowest priority value first; among equals the earlier arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._living: dict[str, tuple[int, float, int, Request]] = {}
        self._last = self._first = 0

    def push(self, request: Request) -> None:
        self._last += 1
        self._enter(request, self._last)

    def push_front(self, request: Request) -> None:
        self._first -= 1
        self._enter(request, self._first)

    def _enter(self, request: Request, place: int) -> None:
        entry = self._living[request.id] = (request.priority, request.arrived_at, place, request)
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        while not self._is_living(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._living[request.id]
        return request

    def remove(self, request: Request) -> None:
        del self._living[request.id]
        if len(self._heap) > 2 * len(self._living):
            self._heap = [entry for entry in self._heap if self._is_living(entry)]
            heapq.heapify(self._heap)

    def _is_living(self, entry: tuple[int, float, int, Request]) -> bool:
        return self._living.get(entry[-1].id) is entry

    def __len__(self) -> int:
        return len(self._living)


LINES: dict[str, type[FcfsQueue] | type[PriorityQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}


class FairQueue:
    """A line for each tenant, by whatever policy; next is the first in that of the tenant that has had
    least."""

    def __init__(self, policy: str, shares: FairShare) -> None:
        self._make_line = LINES[policy]
        self._shares = shares
        self._lines: dict[int, FcfsQueue | PriorityQueue] = {}
        """By tenant, where somebody waits."""

    def push(self, request: Request) -> None:
        if request.tenant not in self._lines:
            self._shares.enter(request, self._lines)
        self._line_of(request).push(request)

    def push_front(self, request: Request) -> None:
        """Who was here before: nothing changes for its tenant."""
        self._line_of(request).push_front(request)

    def _line_of(self, request: Request) -> FcfsQueue | PriorityQueue:
        return self._lines.setdefault(request.tenant, self._make_line())

    def peek(self) -> Request:
        return self._lines[self._shares.lowest(self._lines)].peek()

    def pop(self) -> Request:
        tenant = self._shares.lowest(self._lines)
        request = self._lines[tenant].pop()
        self._drop_if_empty(tenant)
        return request

    def remove(self, request: Request) -> None:
        self._lines[request.tenant].remove(request)
        self._drop_if_empty(request.tenant)

    def _drop_if_empty(self, tenant: int) -> None:
        if not len(self._lines[tenant]):
            del self._lines[tenant]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
