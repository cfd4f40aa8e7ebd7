"""EngineCore: plan, run, update; again."""

import time
from collections.abc import Iterable

from quire.core.lockstep import Lockstep
from quire.core.pipeline import Pipeline
from quire.data.plan import Finish, StepOutput, StepPlan
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.executor import Executor
from quire.sched.scheduler import Scheduler


class EngineCore:
    """The scheduler and the executor, and the steps between them."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        depth: int = 1,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = Pipeline(executor, depth, together=lockstep is not None)
        self.lockstep = lockstep
        """With the engines that have some of the experts; None: it steps by itself."""

    @property
    def executor(self) -> Executor:
        return self.pipeline.executor

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or len(self.pipeline) > 0 or self.is_called

    @property
    def is_called(self) -> bool:
        """Whether others take a step, for which they need this engine."""
        return self.lockstep is not None and self.lockstep.is_called

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> dict[str, Finish]:
        return self.scheduler.abort(request_ids)

    def step(self, timeout_s: float | None = None) -> StepOutput | None:
        """The output of the oldest step, once those behind it are on their way; None if there is none, and
        none can be planned, or if it is not done in time."""
        while self.pipeline.has_room and (plan := self._plan()) is not None:
            self.pipeline.submit(plan)
        if not len(self.pipeline) or (timeout_s is not None and not self.pipeline.ready(timeout_s)):
            return None
        plan, result = self.pipeline.next()
        if not len(plan.rows):
            return StepOutput([], [], at=time.monotonic())
        if result is None:
            return StepOutput([], [], finished=self.scheduler.fail(plan), at=time.monotonic())
        return self.scheduler.update(plan, result)

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        return plan if self.lockstep is None else self.lockstep.agreed(plan)

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    def block_map(self) -> bytes:
        return self.scheduler.kv.pool.block_map()

    def refresh(self, stats: StepStats) -> StepStats:
        """Bring the gauges up to now: requests may have been aborted since the step."""
        scheduler = self.scheduler
        stats.num_running, stats.num_waiting = len(scheduler.running), len(scheduler.admitter.waiting)
        stats.kv_usage = scheduler.kv.pool.usage
        return stats

    def clear(self) -> None:
        """Forget all requests and all prefixes: the way back from a step that broke off halfway.

        Blocks are findable from the plan on that fills them, and a broken step may have filled none.
        """
        scheduler = self.scheduler
        self.pipeline.clear()
        scheduler.forget_flights()
        scheduler.abort(list(scheduler.requests))
        scheduler.reset_prefix_cache()

    def close(self) -> None:
        """End the workers."""
        if self.lockstep is not None:
            self.lockstep.close()
        self.pipeline.clear()
        self.executor.close()
