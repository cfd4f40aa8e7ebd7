"""Executors: how plans reach the workers. Importing this imports no torch."""

from typing import Protocol

from quire.capacity import CacheSize
from quire.data.plan import Pending, StepPlan
from quire.registry import LazyTable


class Executor(Protocol):
    """What the engine asks of the workers."""

    def start(self) -> CacheSize: ...

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step; it may still run when this returns. Plans take effect in the order of submission,
        and what this raises is the failure of the step."""

    def watch(self) -> None:
        """Raise EngineDead if a worker is gone."""

    def close(self) -> None:
        """End all workers."""


__all__ = ["EXECUTORS", "Executor", "Pending"]

EXECUTORS = LazyTable(
    "distributed_executor_backend",
    {
        "uni": "quire.executor.inprocess:InProcessExecutor",
        "mp": "quire.executor.multiprocess:MultiprocessExecutor",
        "ray": "quire.executor.ray:RayExecutor",
    },
)
