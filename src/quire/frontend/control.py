"""Operator calls to all engine cores: pause, sleep, profile, collective RPC."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from quire.data.control import DEFAULT_VERSION, LEVELS, check_choice, check_version
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
        """`settings` are those of the engine, by section."""
        self._call_all = call_all
        self._forget_prefixes = forget_prefixes
        self.settings = settings
        self.weight_version = DEFAULT_VERSION
        """Version of the weights, as a core reported it last."""

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

    # ---- weight updates

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Set up the transfer of weights from a trainer, by the backend of weight_transfer_config."""
        await self._call_weights("connect", dict(init_info))

    async def start_weight_update(self) -> None:
        await self._call_weights("start")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive new weights; the cores go on with the old ones."""
        await self._call_weights("receive", dict(update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply the received weights on all workers, and drop the cached prefixes of the old ones."""
        if weight_version is not None:
            check_version(weight_version)
        await self._call_weights("prepare")
        await self._call_all("commit_weights", {"version": weight_version}, None)
        self._forget_prefixes()
        self.weight_version = (await self._call_all("weight_version", {}))[0]

    async def update_weight_version(self, new_version: str) -> None:
        await self._call_all("set_weight_version", {"version": new_version})
        self.weight_version = new_version

    async def _call_weights(self, action: str, *args: Any) -> None:
        """Run a part of an update on all cores. If it fails on one of them, all drop what they received."""
        _check_sendable(f"{action}_info", args)
        try:
            await self._call_all("call_weights", {"action": action, "args": args}, None)
        except Exception:
            if action in ("receive", "prepare"):
                await self._call_all("call_weights", {"action": "abort", "args": []}, None)
            raise

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
