"""Executors: how plans reach the workers. Importing this imports no torch."""

from typing import Protocol

from quire.capacity import CacheSize
from quire.data.plan import StepPlan, StepResult
from quire.registry import LazyTable


class Executor(Protocol):
    def start(self) -> CacheSize: ...
    def run(self, plan: StepPlan) -> StepResult: ...


EXECUTORS = LazyTable("distributed_executor_backend", {"uni": "quire.executor.inprocess:InProcessExecutor"})
