"""The steps on their way to and from the executor."""

import contextlib
from collections import deque

from quire.core.dp_sync import Lockstep
from quire.data.plan import Masks, StepPlan, StepResult
from quire.errors import EngineDead
from quire.executor import Executor, Pending, Refused
from quire.logs import get_logger

log = get_logger(__name__)


class StepQueue:
    """Up to `depth` steps that were submitted, oldest first.

    With 2 a device has its next step before it is done with the last; where the host itself computes there is
    nothing to gain from more than 1. A pipeline of stages has one for each of them.
    """

    def __init__(self, executor: Executor, depth: int, lockstep: Lockstep | None = None) -> None:
        self.executor = executor
        self.depth = depth
        self.lockstep = lockstep
        """With the engines that have some of the experts; None: it steps by itself."""
        self._steps: deque[tuple[StepPlan, Pending]] = deque()
        self._stray: list[StepPlan] = []
        """Plans that nobody waits for: what they refer to must stay until a later one is done."""
        self.undrawn = False
        """Whether the newest step waits to hear what its rows may sample."""

    def __len__(self) -> int:
        return len(self._steps)

    def has_room(self, masks_come: bool = False) -> bool:
        """For one more plan. None behind a step that was refused, since it would begin where that one should
        have ended, nor before the last one is drawn, unless its masks are being made."""
        is_held = self.undrawn and not masks_come
        return len(self._steps) < self.depth and not is_held and self._refused is None

    @property
    def _refused(self) -> Refused | None:
        """The last step, if it is that."""
        last = self._steps[-1][1] if self._steps else None
        return last if isinstance(last, Refused) else None

    @property
    def is_called(self) -> bool:
        """Whether other engines take a step, for which they need this one."""
        return self.lockstep is not None and self.lockstep.is_called

    def agreed(self, plan: StepPlan | None) -> StepPlan | None:
        """The next step as all who take it know it; it must be submitted."""
        return plan if self.lockstep is None else self.lockstep.agreed(plan)

    def submit(self, plan: StepPlan) -> None:
        pending = self._refused or self._launch(plan)
        self.undrawn = len(plan.constrained) > 0 and not isinstance(pending, Refused)
        self._steps.append((plan, pending))

    def draw(self, masks: Masks) -> None:
        """What the rows of the newest step may sample."""
        self.undrawn = False
        try:
            self.executor.draw(masks)
        except EngineDead:
            raise
        except Exception as error:
            self._steps[-1] = self._steps[-1][0], Refused(error)

    def _launch(self, plan: StepPlan) -> Pending:
        try:
            return self.executor.submit(plan)
        except EngineDead:
            raise
        except Exception as error:
            return Refused(error)

    def ready(self, timeout_s: float) -> bool:
        """Wait for the oldest step up to so long; whether it is done."""
        return self._steps[0][1].ready(timeout_s)

    def next(self) -> tuple[StepPlan, StepResult | None]:
        """The oldest step, when it is done. If it failed there is no result, and none of those behind it."""
        plan, pending = self._steps.popleft()
        try:
            result = pending.wait()
            self._stray.clear()
            return plan, result
        except EngineDead:
            raise
        except Exception as error:
            if self.lockstep is not None:  # they are in the middle of it
                raise EngineDead(f"a step failed that other engines take part in: {error}") from error
            log.exception(
                "A step with %d requests failed; those at fault end, the others go on", len(plan.rows)
            )
        self._drain()
        return plan, None

    def _drain(self) -> None:
        if self.undrawn:
            self.draw(Masks())
        while self._steps:
            _, pending = self._steps.popleft()
            try:
                pending.wait()
            except EngineDead:
                raise
            except Exception as error:
                log.debug("The step behind it failed, too: %s", error)

    def clear(self) -> None:
        """Nobody waits for what is on its way."""
        if self.undrawn:
            with contextlib.suppress(EngineDead):
                self.draw(Masks())
        self._stray += [plan for plan, _ in self._steps]
        self._steps.clear()

    def close(self) -> None:
        """End the workers, and leave those who take each step, too."""
        if self.lockstep is not None:
            self.lockstep.close()
        self.undrawn = False
        self._steps.clear()
        self.executor.close()
