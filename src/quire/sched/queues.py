"""The waiting line, one class per scheduling policy. No operation costs more the longer the line is, but for
the logarithm of a heap."""

import heapq
from collections import OrderedDict
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
        self._line: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._line[request.id] = request

    def push_front(self, request: Request) -> None:
        self._line[request.id] = request
        self._line.move_to_end(request.id, last=False)

    def peek(self) -> Request:
        return next(iter(self._line.values()))

    def pop(self) -> Request:
        return self._line.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._line[request.id]

    def __len__(self) -> int:
        return len(self._line)


_Entry = tuple[int, float, int, Request]


class PriorityLine:
    """Lowest priority value first; among equals the earlier arrival.

    What is removed stays in the heap, dead, until it comes up or the dead outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._living: dict[str, _Entry] = {}
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

    def _is_living(self, entry: _Entry) -> bool:
        return self._living.get(entry[-1].id) is entry

    def __len__(self) -> int:
        return len(self._living)


LINES: dict[str, type[FcfsLine] | type[PriorityLine]] = {"fcfs": FcfsLine, "priority": PriorityLine}
