"""Operator calls to all engine cores: pause, sleep, profile, collective RPC."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from quire.data.control import LEVELS, check_choice
from quire.errors import RequestError

CallAll = Callable[..., Awaitable[list[Any]]]
"""Calls a control method of all engine cores with arguments and a timeout; returns their answers."""


class CoreControl:
    """Operator calls to all engine cores.

    Cores with expert parallelism wait for each other in every step. So all are paused before the first one
    sleeps, and all have their memory back before the first one warms up.
    """

    def __init__(
        self, call_all: CallAll, forget_prefixes: Callable[[], None], settings: Mapping[str, Any]
    ) -> None:
        """Build it. `settings` are those of the engine, by section."""
        self._call_all = call_all
        self._forget_prefixes = forget_prefixes
        self.settings = settings

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Pause all cores and wait until they are idle. By `mode`, running requests are aborted, waited for
        or kept; new requests wait."""
        clears = clear_cache and mode != "keep"
        await self._call_all("pause", {"mode": mode, "clear_cache": clears}, None)
        if clears:
            self._forget_prefixes()

    async def resume(self) -> None:
        await self._call_all("resume", {})

    async def is_paused(self) -> bool:
        return any(await self._call_all("is_paused", {}))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Put all cores to sleep. A core that sleeps at this level does nothing; one that failed tries
        again."""
        if not self.settings.get("model", {}).get("enable_sleep_mode", False):
            raise RequestError("sleep mode is off: start the engine with --enable-sleep-mode")
        check_choice("level", level, LEVELS)
        levels = await self._call_all("settled_level", {})
        if level and all(core_level == level for core_level in levels):
            return
        if max(levels) > level:
            raise RequestError(f"the engine already sleeps at level {max(levels)}: wake it up first", "level")
        await self._call_all("pause", {"mode": mode}, None)
        await self._call_all("sleep", {"level": level}, None)
        self._forget_prefixes()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up all or some parts; steps run again when all parts of all cores are awake."""
        if all(await self._call_all("wake_up", {"tags": tags}, None)):
            await self._call_all("warm_up", {}, None)
            await self._call_all("resume", {})

    async def is_sleeping(self) -> bool:
        return any(await self._call_all("sleep_level", {}))

    async def collective_rpc(
        self, method: str | bytes, timeout: float | None, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method, or a packed function, on every worker of every core; return the results."""
        call = {"method": method, "timeout": timeout, "args": args, "kwargs": kwargs}
        _check_sendable("args", call)
        try:
            results = await self._call_all("collective_rpc", call, timeout)
        except TimeoutError:
            name = method if isinstance(method, str) else "the function"
            raise RequestError(
                f"{name} did not end within {timeout} s and is still running", "timeout"
            ) from None
        return [value for core_results in results for value in core_results]

    async def profile(self, start: bool, prefix: str | None = None) -> None:
        await self._call_all("profile", {"start": start, "prefix": prefix}, None)

    async def reset_encoder_cache(self) -> bool:
        """Drop encoder outputs that no request needs; return whether none is left."""
        return all(await self._call_all("reset_encoder_cache", {}))

    async def abort(self, names: list[str]) -> int:
        """End the requests with these ids; return the number of sequences."""
        _check_sendable("request_ids", names)
        return sum(await self._call_all("abort", {"names": names}))


def _check_sendable(param: str, value: Any) -> None:
    """Raise a RequestError if a value cannot be encoded as msgpack."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{param} cannot be sent to the engine: {error}", param) from None
