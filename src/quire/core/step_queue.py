"""The queue of steps submitted to the executor."""

import contextlib
from collections import deque

from quire.core.dp_sync import Lockstep
from quire.data.step_plan import Masks, StepPlan, StepResult
from quire.errors import EngineDead
from quire.executor import Executor, FailedStep, Pending
from quire.logs import get_logger

log = get_logger(__name__)


class StepQueue:
    """Up to `depth` submitted steps, oldest first.

    With a depth of 2, a GPU has its next step before it finishes the last. On a CPU, a depth above 1 gains
    nothing. Pipeline parallelism needs one step per stage."""

    def __init__(self, executor: Executor, depth: int, lockstep: Lockstep | None = None) -> None:
        self.executor = executor
        self.depth = depth
        self.lockstep = lockstep
        """Synchronization with the engines that share experts; None for an engine that steps alone."""
        self._steps: deque[tuple[StepPlan, Pending]] = deque()
        self._orphaned: list[StepPlan] = []
        """Plans of dropped steps. The device may still read their memory until a later step is done."""
        self.is_unsampled = False
        """Whether the newest step waits for its grammar masks."""

    def __len__(self) -> int:
        return len(self._steps)

    def has_room(self, masks_come: bool = False) -> bool:
        """Whether another step may be submitted. No step may follow a failed submission, since its state
        would be wrong. A step may follow one that waits for masks only if the masks are being computed."""
        is_held = self.is_unsampled and not masks_come
        return len(self._steps) < self.depth and not is_held and self._failed_step is None

    @property
    def _failed_step(self) -> FailedStep | None:
        """Return the last step if its submission failed."""
        last = self._steps[-1][1] if self._steps else None
        return last if isinstance(last, FailedStep) else None

    @property
    def is_called(self) -> bool:
        """Whether other engines have begun a round, so that this engine must take part in their step."""
        return self.lockstep is not None and self.lockstep.is_called

    def join_round(self, plan: StepPlan | None) -> StepPlan | None:
        """Exchange token counts with the engines that step together, and return the next step: the plan with
        all counts, a step without rows if only other engines have work, or None if no engine has work. A
        returned step must be submitted."""
        return plan if self.lockstep is None else self.lockstep.join_round(plan)

    def submit(self, plan: StepPlan) -> None:
        pending = self._failed_step or self._launch(plan)
        self.is_unsampled = len(plan.constrained) > 0 and not isinstance(pending, FailedStep)
        self._steps.append((plan, pending))

    def sample_tokens(self, masks: Masks) -> None:
        """Sample the tokens of the newest step under these grammar masks."""
        self.is_unsampled = False
        try:
            self.executor.sample_tokens(masks)
        except EngineDead:
            raise
        except Exception as error:
            self._steps[-1] = self._steps[-1][0], FailedStep(error)

    def _launch(self, plan: StepPlan) -> Pending:
        try:
            return self.executor.submit(plan)
        except EngineDead:
            raise
        except Exception as error:
            return FailedStep(error)

    def ready(self, timeout_s: float) -> bool:
        """Wait for the oldest step up to `timeout_s` seconds; return whether it is done."""
        return self._steps[0][1].ready(timeout_s)

    def next(self) -> tuple[StepPlan, StepResult | None]:
        """Wait for the oldest step; return its plan and its result. If the step failed, the result is None,
        and the steps after it are dropped."""
        plan, pending = self._steps.popleft()
        try:
            result = pending.wait()
            self._orphaned.clear()
            return plan, result
        except EngineDead:
            raise
        except Exception as error:
            if self.lockstep is not None:  # the other engines are within the same step
                raise EngineDead(f"a step failed that other engines take part in: {error}") from error
            log.exception(
                "A step with %d requests failed; only the requests that caused it end", len(plan.rows)
            )
        self._drain()
        return plan, None

    def _drain(self) -> None:
        if self.is_unsampled:
            self.sample_tokens(Masks())
        while self._steps:
            _, pending = self._steps.popleft()
            try:
                pending.wait()
            except EngineDead:
                raise
            except Exception as error:
                log.debug("A step that was launched before the failure failed as well: %s", error)

    def clear(self) -> None:
        """Drop the steps in flight without reading their results."""
        if self.is_unsampled:
            with contextlib.suppress(EngineDead):
                self.sample_tokens(Masks())
        self._orphaned += [plan for plan, _ in self._steps]
        self._steps.clear()

    def close(self) -> None:
        """End the workers, and leave the group of engines that step together."""
        if self.lockstep is not None:
            self.lockstep.close()
        self.is_unsampled = False
        self._steps.clear()
        self.executor.close()
