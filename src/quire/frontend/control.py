"""Control calls to all engine cores: pause, sleep, weights, adapters, caches, profile, collective RPC."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quire.data.control import DEFAULT_VERSION, LEVELS, MODES, check_choice, check_version
from quire.data.kv_transfer import RemotePrefix
from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import RequestError
from quire.system.pickled_calls import are_pickles_allowed, call_method, pack_function, unpack_results

CALL_TIMEOUT_S = 30.0


class CallAll(Protocol):
    """Function that calls a control method of all engine cores, or with `if_ready` only of the ready ones,
    and returns one answer per core. It raises a TimeoutError after `timeout_s` seconds."""

    def __call__(
        self,
        method: str,
        args: dict[str, Any],
        timeout_s: float | None = CALL_TIMEOUT_S,
        *,
        if_ready: bool = False,
    ) -> Awaitable[list[Any]]: ...


class CoreControl:
    """Control calls to all engine cores, in this process or in others.

    Cores with expert parallelism wait for each other in every step. So all cores are paused before the first
    one sleeps, and all cores have their memory back before the first one warms up.
    """

    def __init__(
        self,
        call_all: CallAll,
        *,
        settings: Mapping[str, Any],
        forget_prefixes: Callable[[], None],
        clear_media: Callable[[], None],
        in_process: bool = False,
    ) -> None:
        """Create the control calls. `settings` are the engine's options by configuration section.
        `forget_prefixes` clears the record of which core has which prefix cached, and `clear_media` the cache
        of processed media, both in this process. `in_process`: the engine core runs in this process."""
        self._call_all = call_all
        self._forget_prefixes, self._clear_media = forget_prefixes, clear_media
        self._in_process = in_process
        self.settings = settings
        self.weight_version = DEFAULT_VERSION
        """Last version of the weights that a core reported."""
        self.loras: dict[int, LoRARequest] = {}
        """The adapters that `add_lora` has loaded, by their ids."""
        self.is_awake = True
        """Whether this client considers all cores awake; False from `sleep` until `wake_up` has woken up all
        parts."""

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Pause all cores and wait until they are idle; requests that arrive meanwhile wait. `mode` decides
        on running requests: `abort` ends them, `wait` lets them finish, `keep` continues them after `resume`.
        `clear_cache` also empties the prefix caches; kept requests are recomputed, as after a preemption."""
        await self._call_all("pause", {"mode": mode, "clear_cache": clear_cache}, None)
        if clear_cache:
            self._forget_prefixes()

    async def resume(self) -> None:
        await self._call_all("resume", {})

    async def is_paused(self) -> bool:
        return any(await self._call_all("is_paused", {}))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause all cores, treating running requests by `mode` as `pause` does, and put them to sleep at
        `level`. Return at once if all cores sleep at this level already."""
        if not self.settings.get("model", {}).get("enable_sleep_mode", False):
            raise RequestError("sleep mode is off: start the engine with --enable-sleep-mode")
        check_choice("level", level, LEVELS)
        check_choice("mode", mode, MODES)
        levels = await self._call_all("settled_level", {})
        if level and all(core_level == level for core_level in levels):
            return
        if max(levels) > level:
            raise RequestError(f"the engine sleeps at level {max(levels)} already: wake it up first", "level")
        self.is_awake = False
        await self._call_all("pause", {"mode": mode}, None)
        await self._call_all("sleep", {"level": level}, None)
        self._forget_prefixes()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up the parts of the engine in `tags` (`weights`, `kv_cache`, `scheduling`; None: all). Steps
        run again when all parts of all cores are awake."""
        if all(await self._call_all("wake_up", {"tags": tags}, None)):
            await self._call_all("warm_up", {}, None)
            await self._call_all("resume", {})
            self.is_awake = True

    async def is_sleeping(self) -> bool:
        return any(await self._call_all("sleep_level", {}))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function with each worker as its first argument; return
        the results of all workers in one list. Raise a RequestError after `timeout` seconds (None: no limit).
        A function is pickled for workers in other processes, and so are arguments that msgpack cannot
        encode."""
        name = method if isinstance(method, str) else "the function"
        is_packed = not isinstance(method, str) and not self._in_process
        call: dict[str, Any] = {
            "method": method,
            "timeout": timeout,
            "args": list(args),
            "kwargs": kwargs or {},
        }
        if isinstance(method, str) and not self._in_process and not is_sendable(call):
            if not are_pickles_allowed():
                raise RequestError(
                    f"the arguments of {name} need a pickle to reach workers in other processes, which"
                    " can run any code: set VLLM_ALLOW_INSECURE_SERIALIZATION=1, or pass plain values",
                    param="args",
                )
            is_packed, args, method = True, (method, *args), call_method
        if not isinstance(method, str) and is_packed:
            call |= {"method": pack_function(method, args, kwargs), "args": [], "kwargs": {}}
        try:
            results = await self._call_all("collective_rpc", call, timeout)
        except TimeoutError:
            raise RequestError(
                f"{name} did not end within {timeout} s and is still running", "timeout"
            ) from None
        values = [value for core_results in results for value in core_results]
        return unpack_results(values) if is_packed else values

    # ---- weight updates

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Set up the transfer of weights from a trainer on all workers, by the backend of
        weight_transfer_config. `init_info` has the arguments of the backend."""
        await self._call_weights("connect", init_info=dict(init_info))

    async def start_weight_update(self) -> None:
        await self._call_weights("start")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive new weights; the cores use the old weights until `finish_weight_update`."""
        await self._call_weights("receive", update_info=dict(update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply the received weights on all workers, and drop the cached prefixes of the old weights."""
        if weight_version is not None:
            check_version(weight_version)
        await self._call_weights("prepare")
        await self._call_all("commit_weights", {"version": weight_version}, None)
        self._forget_prefixes()
        self.weight_version = (await self._call_all("weight_version", {}))[0]

    async def update_weight_version(self, new_version: str) -> None:
        await self._call_all("set_weight_version", {"version": new_version})
        self.weight_version = new_version

    async def _call_weights(self, action: str, **info: Any) -> None:
        """Run one stage of a weight update (`action`, such as `receive`) on all cores. If receiving or
        preparing the weights fails on one core, all cores drop the received weights."""
        try:
            await self._call_all("call_weights", {"action": action, **info}, None)
        except Exception:
            if action in ("receive", "prepare"):
                await self._call_all("call_weights", {"action": "abort"}, None)
            raise

    # ---- adapters

    async def add_adapter(self, lora: LoRARequest) -> AdapterFacts:
        """Load a LoRA adapter in every core; raise a RequestError if it is invalid."""
        if not self.settings.get("lora", {}).get("enable_lora", False):
            raise RequestError("LoRA is not enabled: start the engine with --enable-lora", "lora_request")
        answers = await self._call_all("add_adapter", {"lora": lora}, None)
        return msgspec.convert(answers[0], AdapterFacts)

    async def remove_adapter(self, name: str) -> bool:
        """Remove a LoRA adapter when no request uses it any more; return whether some core had it."""
        return any(await self._call_all("remove_adapter", {"name": name}, None))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        await self.add_adapter(lora_request)
        self.loras[lora_request.lora_int_id] = lora_request
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter that `add_lora` has loaded when no request uses it any more; return whether there
        was one."""
        lora = self.loras.pop(lora_id, None)
        return lora is not None and await self.remove_adapter(lora.lora_name)

    def loaded_lora(self, lora: LoRARequest | None) -> LoRARequest | None:
        """Return the adapter of the same id and name that `add_lora` has loaded, whatever the path of `lora`
        is; if there is none, `lora`."""
        loaded = None if lora is None else self.loras.get(lora.lora_int_id)
        return loaded if loaded == lora else lora

    # ---- caches

    async def reset_prefix_cache(self, running: bool = False, external: bool = False) -> bool:
        """Forget all cached prefixes, with `external` also those of lower tiers. Return False while requests
        hold blocks; with `running`, these requests restart as after a preemption instead."""
        self._forget_prefixes()
        method = "reset_running" if running else "reset_prefix_cache"
        return all(await self._call_all(method, {"external": external}, if_ready=True))

    async def release_prefix(self, prefix: RemotePrefix) -> None:
        """Let the engine that keeps a prefix release it: no request will read it."""
        address = {"host": prefix.host, "port": prefix.port, "request_id": prefix.request_id}
        await self._call_all("release_prefix", address, if_ready=True)

    async def reset_mm_cache(self) -> None:
        """Clear the cache of processed media; the cores notify other API processes."""
        self._clear_media()
        await self._call_all("reset_mm_cache", {})

    async def reset_encoder_cache(self) -> bool:
        """Remove the encoder outputs that no request needs from the encoder caches of all cores; return
        whether all of these caches are empty now."""
        return all(await self._call_all("reset_encoder_cache", {}))

    # ---- other calls

    async def profile(self, start: bool, prefix: str | None = None) -> None:
        await self._call_all("profile", {"start": start, "prefix": prefix}, None)

    async def abort(self, request_ids: list[str] | None) -> int:
        """Abort the requests with these ids (None: all) on all cores; return the number of aborted
        sequences."""
        return sum(await self._call_all("abort", {"request_ids": request_ids}))


def is_sendable(args: Mapping[str, Any]) -> bool:
    """Whether the arguments of a call can be encoded as msgpack."""
    try:
        check_sendable(args)
    except RequestError:
        return False
    return True


def check_sendable(args: Mapping[str, Any]) -> None:
    """Raise a RequestError if an argument of a call cannot be encoded as msgpack."""
    for name, value in args.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"{name} cannot be sent to the engine: {error}", name) from None
