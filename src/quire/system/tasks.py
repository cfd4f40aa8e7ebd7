"""Ending tasks."""

import asyncio
from typing import Any


async def ended(tasks: "list[asyncio.Task[Any]]") -> None:
    """Cancel those that run, and wait until none does. Empties the list: an error on its way knows the frame
    that has it, and the tasks know the error; all that they hold would stay until the collector comes."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
