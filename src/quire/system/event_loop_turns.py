"""Limits of the CPU time that work takes in one turn (iteration) of an asyncio event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_TURN_S = 0.004
_PIECE = 32
"""Number of items that are handled between two checks of the budget."""


class TurnBudget:
    """CPU time that one kind of work may use in each turn of the running event loop, 4 ms by default."""

    def __init__(self, seconds: float = _TURN_S, clock: Callable[[], float] = time.thread_time) -> None:
        self._seconds, self._clock = seconds, clock
        self._ends_at: float | None = None
        """CPU time of the thread, in seconds, at which the budget of this turn is spent; None before its
        first use in the turn."""

    @property
    def is_spent(self) -> bool:
        """Whether further work should wait for a later turn. The first call in a turn starts the budget."""
        if self._ends_at is None:
            self._ends_at = self._clock() + self._seconds
            asyncio.get_running_loop().call_soon(self._end)
            return False
        return self._clock() >= self._ends_at

    def _end(self) -> None:
        self._ends_at = None


class TurnQueue(Generic[T]):
    """A queue whose items are handled in the next turns of the event loop, in each turn until a CPU time
    budget is spent."""

    def __init__(self, handle: Callable[[Sequence[T]], None], budget: TurnBudget | None = None) -> None:
        """Create a queue. `handle` receives up to 32 items at a time, in order; `budget` is the CPU time
        per turn."""
        self._handle = handle
        self._budget = budget or TurnBudget()
        self._items: deque[T] = deque()
        self._is_scheduled = False

    def add(self, item: T) -> None:
        self._items.append(item)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        try:
            while self._items and not self._budget.is_spent:
                self._handle_some()
        finally:
            if self._items:
                self._schedule()

    def _handle_some(self) -> None:
        self._handle([self._items.popleft() for _ in range(min(len(self._items), _PIECE))])

    def flush(self) -> None:
        """Handle all queued items now, without regard to the budget."""
        while self._items:
            self._handle_some()
