"""Executors: how plans reach the workers. Importing this imports no torch."""

from typing import Protocol

from quire.capacity import CacheSize
from quire.data.plan import StepPlan, StepResult
from quire.registry import LazyTable


class Pending(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Blocks until the step is done; raises what the step raised."""


class Executor(Protocol):
    """Whoever has the workers: plans go in, results come out."""

    def start(self) -> CacheSize: ...

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step; it may still run when this returns. Plans take effect in the order of submission,
        and what this raises is the failure of the step."""


EXECUTORS = LazyTable("distributed_executor_backend", {"uni": "quire.executor.inprocess:InProcessExecutor"})
