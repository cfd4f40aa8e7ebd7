"""Backend of a model in a pool, without engine cores."""

import asyncio


class Backend:
    """Records its calls; `error` is raised by loading and waking up."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.problem: Exception | None = None

    async def _change(self, call: str) -> None:
        await asyncio.sleep(0)
        if self.error is not None and call in ("load", "wake_up"):
            raise self.error
        self.calls.append(call)

    async def load(self) -> None:
        await self._change("load")
        self.is_loaded = True

    async def wake_up(self) -> None:
        await self._change("wake_up")

    async def sleep(self, level: int) -> None:
        await self._change(f"sleep {level}")

    async def unload(self) -> None:
        if self.is_loaded:
            await self._change("unload")
        self.is_loaded = False

    def check(self) -> None:
        if self.problem is not None:
            raise self.problem
