"""Executors: how plans reach the workers. Importing this imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.plan import Masks, Pending, StepPlan, StepResult
from quire.memory import CacheSize
from quire.registry import LazyTable


class Executor(Protocol):
    """What the engine asks of the workers."""

    def start(self) -> CacheSize: ...

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step; it may still run when this returns. Plans take effect in the order of submission,
        and what this raises is the failure of the step."""

    def call(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a public method of every worker, behind the plans that were submitted; what they returned, in
        the order of ranks. A function, which is given the worker, only reaches one of this process."""

    def draw(self, masks: Masks) -> None:
        """What the confined rows of the last plan may sample. It comes before the next plan, and before
        anybody waits for the step."""

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        """Have every worker read an adapter while steps go on. Somebody watches until it is done."""

    def drop(self, name: str) -> None:
        """Have them forget one, behind what was fetched before."""

    def watch(self) -> None:
        """Raise EngineDead if a worker is gone."""

    def close(self) -> None:
        """End all workers."""


class Refused:
    """A step that failed when it was submitted."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        raise self._error


__all__ = ["EXECUTORS", "Executor", "Pending", "Refused"]

EXECUTORS = LazyTable(
    "distributed_executor_backend",
    {
        "uni": "quire.executor.inprocess:InProcessExecutor",
        "mp": "quire.executor.multiprocess:MultiprocessExecutor",
        "ray": "quire.executor.ray:RayExecutor",
    },
)
