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

    With 2 a device has its next step before it finishes the last; on a CPU more than 1 gains nothing.
    Pipeline parallelism has one step per stage.
    """

    def __init__(self, executor: Executor, depth: int, lockstep: Lockstep | None = None) -> None:
        self.executor = executor
        self.depth = depth
        self.lockstep = lockstep
        """Synchronization with the engines that share experts; None if there are none."""
        self._steps: deque[tuple[StepPlan, Pending]] = deque()
        self._orphaned: list[StepPlan] = []
        """Plans of dropped steps; the memory they refer to must stay until a later step is done."""
        self.is_unsampled = False
        """Whether the newest step waits for its masks."""

    def __len__(self) -> int:
        return len(self._steps)

    def has_room(self, masks_come: bool = False) -> bool:
        """Whether another step may be submitted. None may follow a failed submission, since it would start
        from a wrong state, nor a step that waits for masks, unless these are being computed."""
        is_held = self.is_unsampled and not masks_come
        return len(self._steps) < self.depth and not is_held and self._failed_step is None

    @property
    def _failed_step(self) -> FailedStep | None:
        """Return the last step if its submission failed."""
        last = self._steps[-1][1] if self._steps else None
        return last if isinstance(last, FailedStep) else None

    @property
    def is_called(self) -> bool:
        """Whether other engines run a step, for which they need this one."""
        return self.lockstep is not None and self.lockstep.is_called

    def agreed(self, plan: StepPlan | None) -> StepPlan | None:
        """Synchronize the next step with the other engines; the result must be submitted."""
        return plan if self.lockstep is None else self.lockstep.agreed(plan)

    def submit(self, plan: StepPlan) -> None:
        pending = self._failed_step or self._launch(plan)
        self.is_unsampled = len(plan.constrained) > 0 and not isinstance(pending, FailedStep)
        self._steps.append((plan, pending))

    def sample_tokens(self, masks: Masks) -> None:
        """Sample the newest step under these masks."""
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
        """Wait for the oldest step up to `timeout_s`; return whether it is done."""
        return self._steps[0][1].ready(timeout_s)

    def next(self) -> tuple[StepPlan, StepResult | None]:
        """Wait for the oldest step and return its result. If it failed, there is no result, and the steps
        after it are dropped."""
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
                log.debug("The next step failed as well: %s", error)

    def clear(self) -> None:
        """Drop the steps in flight; their results are not read."""
        if self.is_unsampled:
            with contextlib.suppress(EngineDead):
                self.sample_tokens(Masks())
        self._orphaned += [plan for plan, _ in self._steps]
        self._steps.clear()

    def close(self) -> None:
        """End the workers, and leave the engines that step together."""
        if self.lockstep is not None:
            self.lockstep.close()
        self.is_unsampled = False
        self._steps.clear()
        self.executor.close()
