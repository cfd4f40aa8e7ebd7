"""The waiting line, one class per scheduling policy."""

import heapq
from collections import deque
from typing import Protocol

from quire.data.request import Request


class WaitingLine(Protocol):
    def push(self, request: Request) -> None: ...
    def push_front(self, request: Request) -> None: ...
    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...


class FcfsLine:
    """First come, first served; who was preempted stands at the front again."""

    def __init__(self) -> None:
        self._line: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._line.append(request)

    def push_front(self, request: Request) -> None:
        self._line.appendleft(request)

    def peek(self) -> Request:
        return self._line[0]

    def pop(self) -> Request:
        return self._line.popleft()

    def remove(self, request: Request) -> None:
        self._line = deque(waiting for waiting in self._line if waiting is not request)

    def __len__(self) -> int:
        return len(self._line)


class PriorityLine:
    """Lowest priority value first; among equals the earlier arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._last = self._first = 0

    def push(self, request: Request) -> None:
        self._last += 1
        heapq.heappush(self._heap, (request.priority, request.arrived_at, self._last, request))

    def push_front(self, request: Request) -> None:
        self._first -= 1
        heapq.heappush(self._heap, (request.priority, request.arrived_at, self._first, request))

    def peek(self) -> Request:
        return self._heap[0][-1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


LINES: dict[str, type[FcfsLine] | type[PriorityLine]] = {"fcfs": FcfsLine, "priority": PriorityLine}
