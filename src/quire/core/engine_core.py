"""The engine core: plans, runs and updates steps."""

import time
from collections.abc import Iterable

from quire.core.dp_sync import Lockstep
from quire.core.pause import PauseState
from quire.core.step_queue import StepQueue
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.data.step_plan import FinishReason, StepOutput
from quire.executor import Executor
from quire.sched.scheduler import Scheduler

CHECKS_S = 0.01
"""Maximum seconds to wait for a grammar or a LoRA adapter while no request can run."""
LOOK_S = 0.002
"""Seconds between two checks of the workers' health during this wait."""


class EngineCore:
    """The engine core: plans steps with the scheduler, and runs them on the workers through the executor."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, *, depth: int = 1, lockstep: Lockstep | None = None
    ) -> None:
        self.scheduler = scheduler
        self.step_queue = StepQueue(executor, depth, lockstep)
        self.pause_state = PauseState()

    @property
    def executor(self) -> Executor:
        return self.step_queue.executor

    @property
    def has_work(self) -> bool:
        can_plan = self.scheduler.has_work and not self.pause_state.is_shut
        return can_plan or len(self.step_queue) > 0 or self.step_queue.is_called

    def add(self, request: Request) -> None:
        if self.pause_state.is_open:
            self.scheduler.add(request)
        else:
            request.queued_at = time.monotonic()
            self.pause_state.outside[request.id] = request

    def abort(self, request_ids: Iterable[str]) -> dict[str, FinishReason]:
        ids = list(request_ids)
        return self.pause_state.drop(ids) | self.scheduler.abort(ids)

    def step(self, timeout_s: float | None = None) -> StepOutput | None:
        """Launch steps; return the output of the oldest, or None if it takes over `timeout_s` (if set)."""
        while True:
            if refused := self.scheduler.settle():
                return StepOutput([], [], finished=refused, at=time.monotonic())
            self._launch()
            if len(self.step_queue) or not self._wait_for_checks(timeout_s):
                break
        if not len(self.step_queue) or (timeout_s is not None and not self.step_queue.ready(timeout_s)):
            return None
        plan, result = self.step_queue.next()
        if result is None or not len(plan.rows):
            finished = self.scheduler.fail(plan) if result is None else {}
            return StepOutput([], [], finished=finished, at=time.monotonic())
        return self.scheduler.update(plan, result)

    def _launch(self) -> None:
        """Launch as many steps as the queue and the scheduler allow."""
        constraints = self.scheduler.constraints
        while self.step_queue.has_room(constraints.has_begun):
            plan = self.step_queue.join_round(None if self.pause_state.is_shut else self.scheduler.plan())
            if plan is None:
                break
            self.sample_tokens()
            self.step_queue.submit(plan)
            constraints.begin(self.scheduler.running)
        self.sample_tokens()

    def _wait_for_checks(self, timeout_s: float | None) -> bool:
        """Wait if no request can run; return whether to plan again, since a grammar or a LoRA adapter is
        ready or may have failed."""
        self.scheduler.kv.flush_stores()
        checks, until = self.scheduler.checks, time.monotonic() + CHECKS_S
        while checks.is_awaiting and time.monotonic() < until:
            if checks.wait(LOOK_S):
                return True
            self.executor.watch()
        return timeout_s is None and checks.is_awaiting

    def sample_tokens(self) -> None:
        """Sample the tokens of the newest step if its grammar masks are complete or being filled."""
        constraints = self.scheduler.constraints
        if self.step_queue.is_unsampled and constraints.has_begun:
            self.step_queue.sample_tokens(constraints.masks())

    def reset_prefix_cache(self, external: bool = False) -> bool:
        return self.scheduler.kv.reset(external)

    def block_map(self) -> bytes:
        return self.scheduler.kv.pool.block_map()

    def refresh(self, stats: StepStats) -> StepStats:
        """Set the gauges in `stats` to the current state: requests may have been aborted since the step."""
        scheduler = self.scheduler
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.admitter.waiting) + len(self.pause_state.outside)
        stats.num_deferred = scheduler.admitter.waiting.num_held
        stats.sleep_level, stats.weight_version = self.pause_state.level, self.pause_state.weight_version
        stats.running_adapters = scheduler.adapters.running_names
        stats.waiting_adapters = scheduler.adapters.waiting_names
        stats.kv_usage = scheduler.kv.pool.usage
        stats.tiers = scheduler.kv.take_tier_stats()
        stats.backlog = scheduler.admitter.backlog(scheduler.requests.values())
        return stats

    def clear(self) -> None:
        """Drop all requests and cached prefixes after a failed step, whose KV blocks may be incomplete."""
        scheduler = self.scheduler
        self.step_queue.clear()
        scheduler.discard_in_flight()
        self.abort([*scheduler.requests, *self.pause_state.outside])
        scheduler.kv.reset()

    def close(self) -> None:
        """End the workers. Grammar masks that steps on the device wait for are completed first."""
        try:
            self.scheduler.constraints.forget()
        finally:
            self.scheduler.kv.close()
            self.step_queue.close()
