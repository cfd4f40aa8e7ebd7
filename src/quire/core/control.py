"""Control of an engine core by operators: pause, sleep, and calls of worker methods."""

import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.core.engine_core import EngineCore
from quire.data.control import DEFAULT_VERSION, LEVELS, MEMORY, TAGS, check_choice, check_version
from quire.data.kv_transfer import RemotePrefix
from quire.data.lora import LoRARequest
from quire.data.step_plan import FinishReason
from quire.errors import EngineDead, EngineError, RequestError
from quire.executor.rpc import check_open
from quire.logs import get_logger

log = get_logger(__name__)

_INTERNAL = re.compile(r"-[0-9a-f]+$")
_SIBLING = re.compile(r"^\d+_")


Work = Generator[Callable[[], Any] | None, Any, Any]
"""A long operation. It yields functions for the workers to run, receives their results, and returns the final
result. It yields None to wait for the next iteration of the core."""


def run_work(work: Work, wait: Callable[[], None]) -> Any:
    """Run an operation in this thread, with `wait` whenever it waits for the core, and return its result."""
    try:
        call = next(work)
        while True:
            if call is None:
                wait()
            call = work.send(None if call is None else call())
    except StopIteration as end:
        return end.value


class Operator:
    """Operations on a core. The core must be paused before it sleeps; no step may run while its workers run
    another operation."""

    def __init__(
        self,
        core: EngineCore,
        end: Callable[[dict[str, FinishReason]], None],
        clear_media: Callable[[], object],
    ) -> None:
        """Set the callbacks: `end` notifies the clients of aborted requests, `clear_media` clears the cache
        of received media."""
        self.core = core
        self._end, self._clear_media = end, clear_media
        self._num_updates = 0

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return, by name, the methods that clients may call. Some return `Work`, which the caller must
        run."""
        core = self.core
        return {
            "reset_prefix_cache": core.reset_prefix_cache,
            "reset_encoder_cache": core.scheduler.media.reset,
            "reset_mm_cache": self._clear_media,
            "reset_running": self.reset_running,
            "release_prefix": self.release_prefix,
            "block_map": core.block_map,
            "sleep_level": lambda: core.pause_state.level,
            "settled_level": lambda: core.pause_state.settled_level,
            "is_paused": lambda: self.is_at_rest,
            "resume": self.resume,
            "abort": self.abort,
            "pause": self.pause,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "warm_up": self.warm_up,
            "collective_rpc": self.collective_rpc,
            "call_weights": self.call_weights,
            "commit_weights": self.commit_weights,
            "weight_version": lambda: core.pause_state.weight_version,
            "set_weight_version": self.set_weight_version,
            "profile": self.profile,
            "add_adapter": self.add_adapter,
            "remove_adapter": self.remove_adapter,
        }

    # ---- pause

    @property
    def is_at_rest(self) -> bool:
        """Whether no step is in flight or will be planned, and no adapter is being read."""
        core, pause_state = self.core, self.core.pause_state
        is_idle = not len(core.step_queue) and not core.scheduler.adapters.is_reading
        return not pause_state.is_open and is_idle and not (pause_state.drains and core.scheduler.has_work)

    def pause(self, mode: str = "abort", clear_cache: bool = False) -> Work:
        """Admit no request, and wait until the core is at rest (no step is in flight or will be planned).
        Mode `abort` ends all requests, `wait` finishes all admitted requests, `keep` holds them until the
        core is resumed. With `clear_cache`, held requests are recomputed after that, as after a
        preemption."""
        core = self.core
        core.pause_state.pause(mode)
        if mode == "abort":
            self._end(core.abort([*core.scheduler.requests, *core.pause_state.outside]))
        while not self.is_at_rest:
            if core.pause_state.is_open:
                raise RequestError("the engine was resumed before it was paused completely")
            yield None
        if clear_cache:
            core.scheduler.requeue_running()
            core.reset_prefix_cache()

    def resume(self) -> None:
        """Resume steps, and admit the requests that have arrived during the pause."""
        for request in self.core.pause_state.resume():
            self.core.add(request)

    def reset_running(self, external: bool = False) -> Work:
        """Reset the prefix cache; running requests are recomputed, as after a preemption. Return whether the
        cache is empty."""
        was_open = yield from self._hold_steps()
        self.core.scheduler.requeue_running()
        is_empty = self.core.reset_prefix_cache(external)
        self._end_hold(was_open)
        return is_empty

    def _hold_steps(self) -> Work:
        """Plan no more steps, and wait until none is in flight; running requests are kept. Return whether the
        core planned steps before, for `_end_hold`."""
        core, was_open = self.core, self.core.pause_state.is_open
        if was_open:
            core.pause_state.pause("keep")
        while core.scheduler.in_flight:  # other engines may still call this engine into steps
            yield None
        return was_open

    def _end_hold(self, was_open: bool) -> None:
        if was_open and not self.core.pause_state.asleep:
            self.resume()

    def release_prefix(self, host: str, port: int, request_id: str) -> None:
        """Let another engine release a prefix that it keeps for a request that was refused here."""
        if (tiers := self.core.scheduler.kv.tiers) is not None:
            tiers.release_remote(RemotePrefix(host, port, request_id))

    # ---- sleep

    def sleep(self, level: int = 1) -> Work:
        """Put the workers to sleep. Running requests are recomputed after wake-up, as after a preemption."""
        check_choice("level", level, LEVELS)
        core, pause_state = self.core, self.core.pause_state
        if pause_state.level > level and not pause_state.is_unsure:
            raise RequestError(
                f"the engine sleeps at level {pause_state.level} already: wake it up first", "level"
            )
        while not self.is_at_rest:
            if pause_state.is_open:
                raise RequestError("the engine is not paused: pause it first, it may have been resumed")
            yield None  # other engines may still have called this engine into a step
        if level == 0 or pause_state.settled_level == level:
            return
        core.scheduler.requeue_running()
        core.scheduler.media.forget_all()
        core.reset_prefix_cache()
        if level > 1:
            core.scheduler.adapters.forget_all()
            core.pause_state.weight_version = DEFAULT_VERSION  # wake-up loads the weights of the checkpoint
        # Set even if the call fails: workers can wake up from any state.
        pause_state.level, pause_state.asleep, pause_state.is_unsure = level, set(MEMORY), True
        yield partial(self._call_workers, "sleep", [level])
        pause_state.is_unsure = False

    def wake_up(self, tags: Sequence[str] | None = None) -> Work:
        """Restore the memory of `tags` on the workers, or all memory if `tags` is empty. Return whether all
        memory is restored, so that the client may call `warm_up` and `resume`. Warm-up is a separate call,
        since engines that step together warm up together."""
        for tag in tags or ():
            check_choice("tags", tag, TAGS)
        pause_state = self.core.pause_state
        if not pause_state.level:
            return True
        missing = pause_state.asleep - set(tags or TAGS)
        yield partial(self._call_workers, "wake_up", [sorted(set(MEMORY) - missing)])
        # The KV cache counts as asleep until the workers are warm.
        pause_state.asleep, pause_state.is_unsure = missing or {"kv_cache"}, False
        return not missing

    def warm_up(self) -> Work:
        pause_state = self.core.pause_state
        if pause_state.level and pause_state.asleep == {"kv_cache"}:
            yield partial(self._call_workers, "warm_up", [])
            pause_state.asleep = set()

    def _call_workers(self, method: str, args: list[Any]) -> None:
        started = time.monotonic()
        try:
            self.core.executor.call(method, args)
        except EngineDead:
            raise
        except Exception as error:
            raise EngineError(
                f"{method} failed, and the engine is asleep; try again, or call wake_up: {error}"
            ) from error
        log.info("The call of the worker method %s took %.2f s", method, time.monotonic() - started)

    # ---- adapters

    def add_adapter(self, lora: LoRARequest | Mapping[str, Any]) -> Work:
        """Read a LoRA adapter if it is new, wait for it, and return its `AdapterFacts`."""
        lora = msgspec.convert(lora, LoRARequest)
        if self.core.pause_state.asleep:
            raise RequestError("the engine sleeps: wake it up first")
        adapters = self.core.scheduler.adapters
        adapter = adapters.begin(lora)
        try:
            while not adapter.is_settled:
                yield None
                adapters.collect_reads()
        finally:
            adapter.num_calls -= 1
        if adapter.error is not None:
            raise adapter.error
        return adapter.facts

    def remove_adapter(self, name: str) -> Work:
        """Retire a LoRA adapter, and wait until no request uses it. Return whether it was loaded."""
        adapters = self.core.scheduler.adapters
        was_known = adapters.retire(name)
        while not adapters.sweep(name):
            yield None
            adapters.collect_reads()
        return was_known

    # ---- weight updates

    def call_weights(self, action: str, **info: Any) -> Work:
        """Call the method `action` of each worker's weight updater with the values of `info`; the result is a
        list by rank. Steps use the old weights until `commit_weights`."""
        if self.core.pause_state.asleep:
            raise RequestError("the engine sleeps: wake it up first")
        yield from self._wait_for_masks()
        return (yield partial(self.core.executor.call, "update_weights", [action, *info.values()]))

    def commit_weights(self, version: str | None = None) -> Work:
        """Apply the staged weights between two steps. Nothing that the old weights computed is used again:
        cached prefixes are dropped, and running requests are recomputed, as after a preemption."""
        core, was_open = self.core, (yield from self._hold_steps())
        try:
            yield partial(core.executor.call, "update_weights", ["commit"])
            self._num_updates += 1
            core.pause_state.weight_version = version or f"update-{self._num_updates}"
            core.scheduler.requeue_running()
            core.scheduler.media.forget_all()
            core.reset_prefix_cache(external=True)
            if (tiers := core.scheduler.kv.tiers) is not None:
                tiers.weights_changed()
        finally:
            self._end_hold(was_open)
        log.info("The weight version is now %r", core.pause_state.weight_version)

    def set_weight_version(self, version: str) -> None:
        check_version(version)
        self.core.pause_state.weight_version = version

    # ---- workers and requests

    def collective_rpc(
        self,
        method: str | bytes | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Work:
        """Call a method of every worker, or a function with each worker as its first argument; return the
        results of all workers."""
        if isinstance(method, str):
            check_open(method)
        yield from self._wait_for_masks()
        return (yield partial(self.core.executor.call, method, args, kwargs, timeout))

    def profile(self, start: bool, prefix: str | None = None) -> Work:
        """Start or stop a profile. This runs in the core's thread, since the profiler records its caller."""
        yield from self._wait_for_masks()
        self.core.executor.call("profile", [start, prefix])

    def _wait_for_masks(self) -> Work:
        """Wait until the grammar masks of the last plan are sent to the workers, which expect them right
        after the plan."""
        self.core.sample_tokens()
        while self.core.step_queue.is_unsampled:
            yield None
            self.core.sample_tokens()

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """End the requests with these ids, as clients know them, or all (None); return the number of aborted
        sequences."""
        inside = [*self.core.scheduler.requests, *self.core.pause_state.outside]
        if request_ids is not None:
            wanted = set(request_ids)
            inside = [id for id in inside if wanted & set(_names_of(id))]
        ended = self.core.abort(inside)
        self._end(ended)
        return len(ended)


def _names_of(request_id: str) -> list[str]:
    """Return the ids by which clients can name a sequence to abort it: its own id, the id without the
    sequence prefix and the unique suffix, and the latter without the prompt number."""
    plain = _INTERNAL.sub("", _SIBLING.sub("", request_id))
    return [request_id, plain, re.sub(r"-\d+$", "", plain)]
