"""Cancellation of asyncio tasks."""

import asyncio
from typing import Any


async def cancel_all(tasks: "list[asyncio.Task[Any]]") -> None:
    """Cancel all tasks and wait until they have ended. The list is emptied: otherwise it would form a
    reference cycle with a raised error, which keeps its memory until the garbage collector runs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
