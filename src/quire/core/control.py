"""Operator: a core paused and put to sleep, and methods of its workers called."""

import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.core.engine_core import EngineCore
from quire.data.control import LEVELS, MEMORY, MODES, TAGS, check_choice
from quire.data.lora import LoRARequest
from quire.data.plan import FinishReason
from quire.errors import EngineDead, EngineError, RequestError
from quire.executor.rpc import check_open
from quire.logs import get_logger

log = get_logger(__name__)

_INTERNAL = re.compile(r"-[0-9a-f]+$")
_SIBLING = re.compile(r"^\d+_")


Work = Generator[Callable[[], Any] | None, Any, Any]
"""Something that takes its time. It yields what the workers are to do, is sent what came of that, and returns
the answer; None: it waits for another turn of the core."""


def done(work: Work) -> Any:
    """The answer, of work that waits for nothing but the workers, who do it here and now."""
    try:
        asked = next(work)
        while asked is not None:
            asked = work.send(asked())
    except StopIteration as end:
        return end.value
    raise RequestError("steps are under way: take them first")


class Operator:
    """What operators do with a core. It rests before it sleeps; no step may run while its workers do
    something else."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    # ---- rest

    @property
    def is_at_rest(self) -> bool:
        """No step is under way, and none will be; no adapter is being read."""
        core, gate = self.core, self.core.gate
        is_idle = not len(core.pipeline) and not core.scheduler.adapters.is_reading
        return not gate.is_open and is_idle and not (gate.drains and core.scheduler.has_work)

    def pause(self, mode: str = "abort") -> dict[str, FinishReason]:
        """Take in nobody, and plan nothing that need not be; those who end with it. It is at rest once the
        steps under way have landed."""
        check_choice("mode", mode, MODES)
        core = self.core
        core.gate.is_open, core.gate.drains = False, mode == "wait"
        if mode != "abort":
            return {}
        return core.abort([*core.scheduler.requests, *core.gate.outside])

    def resume(self) -> None:
        """Take steps again, with those who have come since."""
        gate = self.core.gate
        if gate.asleep:
            raise RequestError(f"{_and(gate.asleep)} sleep: wake them up first")
        gate.level, gate.is_open, gate.drains = 0, True, False
        outside, gate.outside = gate.outside, {}
        for request in outside.values():
            self.core.add(request)

    def reset_running(self) -> Work:
        """Forget all prefixes; requests that hold some start from the beginning, as after a preemption."""
        gate, core = self.core.gate, self.core
        was_open = gate.is_open
        if was_open:
            self.pause("keep")
        while core.scheduler.in_flight:  # other engines may go on to call it into steps
            yield None
        core.scheduler.send_back()
        is_empty = core.reset_prefix_cache()
        if was_open and not gate.asleep:
            self.resume()
        return is_empty

    # ---- sleep

    def sleep(self, level: int = 1) -> Work:
        """Those who are inside start from the beginning when it wakes up, as after a preemption."""
        check_choice("level", level, LEVELS)
        core, gate = self.core, self.core.gate
        if gate.level > level and not gate.is_unsure:
            raise RequestError(f"the engine sleeps at level {gate.level} already: wake it up first", "level")
        while not self.is_at_rest:
            if gate.is_open:
                raise RequestError("the engine does not rest: pause it first, or somebody has resumed it")
            yield None  # other engines may still have called it into a step
        if level == 0 or gate.settled_level == level:
            return
        core.scheduler.send_back()
        core.scheduler.media.forget_all()
        core.reset_prefix_cache()
        if level > 1:
            core.scheduler.adapters.forget_all()
        # Even if it fails: workers wake up from whatever they have come to.
        gate.level, gate.asleep, gate.is_unsure = level, set(MEMORY), True
        yield partial(self._call_own, "sleep", [level])
        gate.is_unsure = False

    def wake_up(self, tags: Sequence[str] | None = None) -> Work:
        """Have the workers take back all, or some of it. Whether nothing is missing: then they warm up, and
        steps are resumed. Workers that take steps together do that together, so each waits for all."""
        for tag in tags or ():
            check_choice("tags", tag, TAGS)
        gate = self.core.gate
        if not gate.level:
            return True
        missing = gate.asleep - set(tags or TAGS)
        yield partial(self._call_own, "wake_up", [sorted(set(MEMORY) - missing)])
        gate.asleep, gate.is_unsure = missing or {"kv_cache"}, False  # until they are warm
        return not missing

    def warm_up(self) -> Work:
        gate = self.core.gate
        if gate.level and gate.asleep == {"kv_cache"}:
            yield partial(self._call_own, "warm_up", [])
            gate.asleep = set()

    def _call_own(self, method: str, args: list[Any]) -> None:
        started = time.monotonic()
        try:
            self.core.executor.call(method, args)
        except EngineDead:
            raise
        except Exception as error:
            raise EngineError(
                f"{method} failed, and the engine sleeps; it may be tried again, or woken up: {error}"
            ) from error
        log.info("%s took %.2f s", method, time.monotonic() - started)

    # ---- adapters

    def add_adapter(self, lora: LoRARequest) -> Work:
        """Until it was read; what is known of it then."""
        if self.core.gate.asleep:
            raise RequestError("the engine sleeps: wake it up first")
        adapters = self.core.scheduler.adapters
        adapter = adapters.begin(lora)
        try:
            while not adapter.is_settled:
                yield None
                adapters.take_in()
        finally:
            adapter.num_asking -= 1
        if adapter.error is not None:
            raise adapter.error
        return adapter.facts

    def remove_adapter(self, name: str) -> Work:
        """Until no request uses it any more. Whether it was known."""
        adapters = self.core.scheduler.adapters
        was_known = adapters.retire(name)
        while not adapters.sweep(name):
            yield None
            adapters.take_in()
        return was_known

    # ---- workers and requests

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Work:
        """What a method returns on every worker."""
        if isinstance(method, str):
            check_open(method)
        yield from self._until_drawn()
        return (yield partial(self.core.executor.call, method, args, kwargs, timeout))

    def profile(self, start: bool, prefix: str | None = None) -> Work:
        """In this thread, of which it records what it does."""
        yield from self._until_drawn()
        self.core.executor.call("profile", [start, prefix])

    def _until_drawn(self) -> Work:
        """Workers hear masks right behind their plan, and nothing in between."""
        self.core.draw()
        while self.core.pipeline.undrawn:
            yield None
            self.core.draw()

    def abort(self, names: Iterable[str]) -> dict[str, FinishReason]:
        """End the requests with these ids, as users know them."""
        wanted, inside = set(names), [*self.core.scheduler.requests, *self.core.gate.outside]
        return self.core.abort([id for id in inside if wanted & set(_names_of(id))])


def _names_of(request_id: str) -> list[str]:
    """A request's own id; that of the call whose prompt it is; and both without what makes them unique."""
    plain = _INTERNAL.sub("", _SIBLING.sub("", request_id))
    return [request_id, plain, re.sub(r"-\d+$", "", plain)]


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))
