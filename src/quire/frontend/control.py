"""Operation: what operators ask of all cores at once."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from quire.data.control import LEVELS, check_choice
from quire.errors import RequestError

CallAll = Callable[..., Awaitable[list[Any]]]
"""Takes a method of the core's desk, its arguments and how long to wait; the answers of all cores."""


class CoreControl:
    """The engine as its operators see it: paused, asleep, asked for what its workers say.

    Cores that share experts wait for each other in every step, so that all rest before the first of them
    sleeps, and all have their memory before the first of them warms up.
    """

    def __init__(
        self, call_all: CallAll, forget_prefixes: Callable[[], None], settings: Mapping[str, Any]
    ) -> None:
        """`settings` are the engine's, by section."""
        self._call_all = call_all
        self._forget_prefixes = forget_prefixes
        self.settings = settings

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Until all rest. Those who are running end, are waited for, or are kept; who comes waits."""
        clears = clear_cache and mode != "keep"
        await self._call_all("pause", {"mode": mode, "clear_cache": clears}, None)
        if clears:
            self._forget_prefixes()

    async def resume(self) -> None:
        await self._call_all("resume", {})

    async def is_paused(self) -> bool:
        return any(await self._call_all("is_paused", {}))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Nothing happens if it sleeps so already; one that failed to fall asleep tries again."""
        if not self.settings.get("model", {}).get("enable_sleep_mode", False):
            raise RequestError("sleep mode is off: start the engine with --enable-sleep-mode")
        check_choice("level", level, LEVELS)
        levels = await self._call_all("settled_level", {})
        if level and all(each == level for each in levels):
            return
        if max(levels) > level:
            raise RequestError(f"the engine sleeps at level {max(levels)} already: wake it up first", "level")
        await self._call_all("pause", {"mode": mode}, None)
        await self._call_all("sleep", {"level": level}, None)
        self._forget_prefixes()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """All or some of it; steps are taken again when nothing sleeps any more, on any core."""
        if all(await self._call_all("wake_up", {"tags": tags}, None)):
            await self._call_all("warm_up", {}, None)
            await self._call_all("resume", {})

    async def is_sleeping(self) -> bool:
        return any(await self._call_all("sleep_level", {}))

    async def collective_rpc(
        self, method: str, timeout: float | None, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """What a method returns on every worker of every core."""
        given = {"method": method, "timeout": timeout, "args": args, "kwargs": kwargs}
        _check_sendable("args", given)
        try:
            found = await self._call_all("collective_rpc", given, timeout)
        except TimeoutError:
            raise RequestError(
                f"{method} was not over within {timeout} s, and still runs", "timeout"
            ) from None
        return [value for of_core in found for value in of_core]

    async def profile(self, start: bool, prefix: str | None = None) -> None:
        await self._call_all("profile", {"start": start, "prefix": prefix}, None)

    async def reset_encoder_cache(self) -> bool:
        """Forget vectors that no request needs; whether there are no others."""
        return all(await self._call_all("reset_encoder_cache", {}))

    async def abort(self, names: list[str]) -> int:
        """How many sequences were ended, of the requests with these ids."""
        _check_sendable("request_ids", names)
        return sum(await self._call_all("abort", {"names": names}))


def _check_sendable(param: str, given: Any) -> None:
    """That it is text and numbers of a usual size."""
    try:
        msgspec.msgpack.encode(given)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{param} cannot be sent to the engine: {error}", param) from None
