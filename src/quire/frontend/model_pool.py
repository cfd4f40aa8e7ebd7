"""ModelPool: several models that share one memory budget. Idle models sleep, and wake up on request."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from quire.errors import EngineDead, QuireError
from quire.logs import get_logger
from quire.memory import ModelMemory, human

log = get_logger(__name__)

RETRY_S = 30.0
"""Seconds after which a request may load a model again that failed to load."""
TICK_S = 1.0
"""Seconds between two checks for idle models."""


class ModelBackend(Protocol):
    """The engine cores of a model."""

    @property
    def is_loaded(self) -> bool:
        """Whether the engine cores of the model run; they may be asleep."""

    async def load(self) -> None:
        """Start the cores and load the weights; raise a QuireError if that fails."""

    async def wake_up(self) -> None: ...
    async def sleep(self, level: int) -> None: ...
    async def unload(self) -> None:
        """End the cores."""

    def check(self) -> None:
        """Raise an EngineError if a core that should run makes no progress."""


class PoolModel:
    """A model of a `ModelPool`, with its state and its running and waiting requests."""

    def __init__(
        self,
        name: str,
        backend: ModelBackend,
        memory: ModelMemory,
        *,
        pinned: bool = False,
        can_sleep: bool = True,
        keeps_weights: bool = False,
    ) -> None:
        """Create an unloaded model. A `pinned` model is never put to sleep or unloaded for another model.
        With `keeps_weights`, sleep level 1 does not free the weights' memory in the budget, as on a CPU."""
        self.name = name
        self.backend = backend
        self.memory = memory
        self.pinned = pinned
        self.can_sleep = can_sleep
        self.is_awake = False
        self.level = 0
        """Sleep level of a model that is loaded and not awake."""
        self.error = ""
        """Why loading failed; empty if it did not fail."""
        self.failed_at = 0.0
        self.changing = ""
        """Current change of state: `loading`, `waking` or `leaving`; empty if there is none."""
        self.num_users = 0
        self.used_at = 0.0
        self.waiting: list[asyncio.Future[None]] = []
        self.left = asyncio.Event()
        """Set when the last running request has ended."""
        self._asleep_bytes = memory.weights if keeps_weights else 0
        self.keeps_weights = keeps_weights

    @property
    def state(self) -> str:
        """Return `awake`, `asleep`, `unloaded`, `failed`, or the current change of state."""
        if self.changing:
            return self.changing
        if self.error:
            return "failed"
        if not self.backend.is_loaded:
            return "unloaded"
        return "awake" if self.is_awake else "asleep"

    @property
    def sleep_level(self) -> int:
        return self.level if self.state == "asleep" else 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the budget that the model uses now."""
        if self.is_awake or self.changing in ("loading", "waking"):
            return self.memory.awake
        return self._asleep_bytes if self.backend.is_loaded and self.level == 1 else 0


class ModelPool:
    """The models of a server. At most `budget_bytes` of memory are used by models at the same time.

    A request for a model that is not awake waits, and its model waits in line for memory. Models are brought
    up one at a time, in the order of their first waiting request. The least recently used models make way:
    they get no further requests, finish their running requests, and sleep or are unloaded. So every waiting
    model has its turn after a finite number of other models.
    """

    def __init__(
        self,
        models: Iterable[PoolModel],
        *,
        budget_bytes: int,
        sleep_after_s: float | None = None,
        discard_after_s: float | None = None,
        host_free_bytes: Callable[[], int] = lambda: 1 << 62,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the pool; `start` loads its first models. Models that were idle for `sleep_after_s` seconds
        sleep at level 1, and after `discard_after_s` seconds at level 2; None: never. `host_free_bytes`
        returns the free bytes of host memory, which weights need at level 1."""
        self.models = {model.name: model for model in models}
        self.budget_bytes = budget_bytes
        self._sleep_after_s = sleep_after_s
        self._discard_after_s = discard_after_s
        self._host_free_bytes = host_free_bytes
        self._clock = clock
        self._line: list[PoolModel] = []
        """Models that wait for memory, in order."""
        self._work = asyncio.Event()
        self._changing = asyncio.Lock()
        """Held while a model changes its state."""
        self._tasks: list[asyncio.Task[None]] = []
        self.started = asyncio.Event()
        """Set when the first models are loaded or have failed."""

    # ---- life

    def start(self) -> None:
        """Start loading the first models in the running loop: pinned models, then others while they fit."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._load_first())]

    async def _load_first(self) -> None:
        for model in sorted(self.models.values(), key=lambda model: not model.pinned):
            if self._used_bytes(model) + model.memory.awake <= self.budget_bytes:
                try:
                    await self.load(model)
                except QuireError:
                    continue  # its requests get the error
        self.started.set()

    async def close(self) -> None:
        """End all models. Requests that still wait get an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self.models.values():
            self._refuse_waiting(model, EngineDead("the server is shutting down"))
        await asyncio.gather(*(model.backend.unload() for model in self.models.values()))

    # ---- requests

    @asynccontextmanager
    async def using(self, model: PoolModel) -> AsyncIterator[None]:
        """Wait in line until the model is awake, and keep it awake inside of the context."""
        await self.acquire(model)
        try:
            yield
        finally:
            self.release(model)

    async def acquire(self, model: PoolModel) -> None:
        """Wait until a model is awake; it stays awake until `release`. Raise EngineDead if loading fails."""
        if model.is_awake and not model.changing:
            model.num_users += 1
            return
        if model.error and self._clock() - model.failed_at < RETRY_S:
            raise EngineDead(f"the model {model.name} could not be loaded: {model.error}")
        await self._wait(model)

    async def _wait(self, model: PoolModel) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(waiter)
        if model not in self._line:
            self._line.append(model)
            self._work.set()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(model)
            raise
        finally:
            if waiter in model.waiting:
                model.waiting.remove(waiter)

    def release(self, model: PoolModel) -> None:
        model.num_users -= 1
        model.used_at = self._clock()
        if not model.num_users:
            model.left.set()

    # ---- operators

    async def load(self, model: PoolModel) -> None:
        """Load or wake up a model for an operator, and wait until it is awake. Unlike a request, this retries
        at once after a failure."""
        if model.is_awake and not model.changing:
            return
        model.error = ""
        await self._wait(model)
        self.release(model)

    async def unload(self, model: PoolModel) -> None:
        """End the cores of a model once its running requests have finished, and wait for that. The next
        request loads the model again."""
        async with self._changing:
            await self._leave(model, level=None)
            model.error = ""

    def check(self) -> None:
        """Raise EngineDead while the first models load, if a model makes no progress, or if all failed."""
        models = self.models.values()
        if not self.started.is_set():
            loading = [model.name for model in models if model.state == "loading"]
            raise EngineDead(f"the models are being loaded: {', '.join(loading) or 'starting'}")
        failed = [model for model in models if model.state == "failed"]
        if failed and len(failed) == len(self.models):
            raise EngineDead(f"no model could be loaded; {failed[0].name}: {failed[0].error}")
        for model in models:
            if not model.error:
                self.check_model(model)

    def check_model(self, model: PoolModel) -> None:
        """Raise EngineDead if the model could not be loaded, or is loaded and makes no progress."""
        if model.error:
            raise EngineDead(f"the model {model.name} could not be loaded: {model.error}")
        if model.state in ("awake", "asleep"):
            model.backend.check()

    # ---- changes

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await self._work.wait()
            except TimeoutError:
                await self.sleep_idle()
                continue
            self._work.clear()
            while self._line:
                await self._bring_up_next()

    async def _bring_up_next(self) -> None:
        """Load or wake up the first model in line, and let its waiting requests run."""
        async with self._changing:
            model = self._line[0]
            try:
                if model.waiting:
                    await self._bring_up(model)
            except QuireError as error:
                log.error("Model %s could not be loaded: %s", model.name, error)
                model.error, model.failed_at = str(error), self._clock()
                failure = EngineDead(f"the model {model.name} could not be loaded: {error}")
                self._refuse_waiting(model, failure)
            except Exception as error:  # the task serves all models and must not end
                log.exception("Model %s could not be loaded", model.name)
                model.error, model.failed_at = type(error).__name__, self._clock()
                self._refuse_waiting(model, EngineDead(f"the model {model.name} could not be loaded"))
            finally:
                model.changing = ""
                self._line.remove(model)
            self._admit_waiting(model)

    def _admit_waiting(self, model: PoolModel) -> None:
        if not model.is_awake:
            return
        waiters, model.waiting = model.waiting, []
        for waiter in waiters:
            if not waiter.done():
                model.num_users += 1
                waiter.set_result(None)

    def _refuse_waiting(self, model: PoolModel, error: Exception) -> None:
        waiters, model.waiting = model.waiting, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def _bring_up(self, model: PoolModel) -> None:
        if model.is_awake:
            return
        await self._make_room(model)
        is_loaded, began = model.backend.is_loaded, self._clock()
        model.changing = "waking" if is_loaded else "loading"
        try:
            await (model.backend.wake_up() if is_loaded else model.backend.load())
        except BaseException:
            await model.backend.unload()
            raise
        model.is_awake, model.level, model.error, model.used_at = True, 0, "", self._clock()
        action = "woken up" if is_loaded else "loaded"
        log.info("Model %s was %s in %.2f s", model.name, action, self._clock() - began)

    async def _make_room(self, model: PoolModel) -> None:
        """Put other models to sleep, or unload them, until the model fits into the budget."""
        while self._used_bytes(model) + model.memory.awake > self.budget_bytes:
            others = [
                other
                for other in self.models.values()
                if other is not model and not other.pinned and other.num_bytes
            ]
            if not others:
                raise EngineDead(
                    f"{model.name} needs {human(model.memory.awake)} of {human(self.budget_bytes)} for all "
                    "models, and pinned models leave less: raise --models-memory-gb or pin fewer models"
                )
            victim = min(others, key=lambda other: (other.is_awake, other.num_users > 0, other.used_at))
            await self._leave(victim, level=self._level_of(victim))

    def _used_bytes(self, model: PoolModel) -> int:
        return sum(other.num_bytes for other in self.models.values() if other is not model)

    def _level_of(self, victim: PoolModel) -> int | None:
        """Return the sleep level for a model that frees memory for another one, or None to unload it. Level 1
        is for awake models, if this level frees all of their budget memory and the host has room for the
        weights."""
        if not victim.can_sleep:
            return None
        fits = victim.memory.weights < self._host_free_bytes()
        return 1 if fits and not victim.keeps_weights and victim.is_awake else 2

    async def _leave(self, model: PoolModel, *, level: int | None) -> None:
        """Put a model to sleep at `level`, or unload it if that is None, once its running requests have
        finished. New requests wait meanwhile."""
        if not model.backend.is_loaded:
            model.is_awake = False
            return
        model.changing = "leaving"
        try:
            while model.num_users:
                model.left.clear()
                await model.left.wait()
            if level is None or not await self._sleep(model, level):
                level = None
                await model.backend.unload()
            model.is_awake, model.level = False, level or 0
            change = "was unloaded" if level is None else f"sleeps at level {level}"
            log.info("Model %s %s", model.name, change)
        finally:
            model.changing = ""
            self._admit_waiting(model)  # if the model stayed awake

    async def _sleep(self, model: PoolModel, level: int) -> bool:
        """Put a model to sleep. Return False if that fails, so that the model has to be unloaded."""
        try:
            await model.backend.sleep(level)
        except Exception as error:  # the task that calls this serves all models and must not end
            log.error("Model %s could not be put to sleep and is unloaded: %s", model.name, error)
            return False
        return True

    async def sleep_idle(self) -> None:
        """Put models to sleep that have been idle for long, if no model is changing."""
        for model in self.models.values():
            if self._changing.locked() or model.pinned or model.num_users or model.changing:
                continue
            idle_s, level = self._clock() - model.used_at, model.level
            if self._is_due(idle_s, self._discard_after_s):
                level = 2
            elif self._is_due(idle_s, self._sleep_after_s):
                level = max(level, 1)
            if level > model.level and model.can_sleep and model.backend.is_loaded:
                async with self._changing:
                    await self._leave(model, level=level)

    @staticmethod
    def _is_due(idle_s: float, after_s: float | None) -> bool:
        return after_s is not None and idle_s >= after_s
