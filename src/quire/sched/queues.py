"""The waiting line, one class per scheduling policy.

Who is removed stays where it stood, dead, until it comes up or the dead outnumber the living: so no operation
costs more the longer the line is, but for the logarithm of a heap. A request that enters again gets a new
entry, which tells it from its dead one.
"""

import heapq
from collections import deque
from typing import Protocol

from quire.data.request import Request


class WaitingLine(Protocol):
    """The requests that wait, in the order in which they come in. A request stands in it once."""

    def push(self, request: Request) -> None: ...
    def push_front(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...


class FcfsLine:
    """First come, first served; who was preempted stands at the front again."""

    def __init__(self) -> None:
        self._line: deque[tuple[Request]] = deque()
        self._living: dict[str, tuple[Request]] = {}

    def push(self, request: Request) -> None:
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


class PriorityLine:
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


LINES: dict[str, type[FcfsLine] | type[PriorityLine]] = {"fcfs": FcfsLine, "priority": PriorityLine}
