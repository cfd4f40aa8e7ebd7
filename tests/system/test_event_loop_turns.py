"""Tests of work in pieces, one per turn of the event loop."""

import asyncio
from collections.abc import Sequence

from quire.system.event_loop_turns import TurnBudget, TurnQueue


def test_budget_is_spent_once_per_turn() -> None:
    now = 0.0
    budget = TurnBudget(0.004, lambda: now)

    async def go() -> None:
        nonlocal now
        assert not budget.is_spent and not budget.is_spent
        now = 0.0041
        assert budget.is_spent
        await asyncio.sleep(0)
        assert not budget.is_spent, "a new turn has a new budget"

    asyncio.run(go())


def test_queue_handles_items_in_pieces() -> None:
    """Each item takes 1 ms here, so that a piece of 32 takes longer than a turn may."""
    now, handled = 0.0, list[list[int]]()

    def handle(items: Sequence[int]) -> None:
        nonlocal now
        now += 0.001 * len(items)
        handled.append(list(items))

    async def go() -> None:
        queue = TurnQueue[int](handle, TurnBudget(0.004, lambda: now))
        for item in range(100):
            queue.add(item)
        assert not handled
        sizes = []
        while sum(sizes) < 100:
            before = len(handled)
            await asyncio.sleep(0)
            sizes.append(sum(map(len, handled[before:])))
        assert max(sizes) == 32 and sum(handled, []) == list(range(100))
        queue.add(1)
        queue.flush()
        assert handled[-1] == [1]
        await asyncio.sleep(0)

    asyncio.run(go())


def test_queue_continues_after_an_error() -> None:
    handled = list[int]()

    def handle(items: Sequence[int]) -> None:
        handled.append(len(items))
        if len(handled) == 1:
            raise ValueError("once")

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        queue = TurnQueue[int](handle)
        for item in range(40):
            queue.add(item)
        for _ in range(3):
            await asyncio.sleep(0)
        assert handled == [32, 8]

    asyncio.run(go())
