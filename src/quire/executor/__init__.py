"""Executors send plans to the workers. Importing this package does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from quire.data.kv_tiers import BlockLoad, BlockRead, LoadDone
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.step_plan import Masks, Pending, StepPlan, StepResult
from quire.memory import CacheSize
from quire.registry import LazyTable


class Executor(Protocol):
    """The interface of the engine core to its workers."""

    def start(self) -> CacheSize: ...

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step; it may still run when this returns. Plans take effect in the order of submission. If
        this raises, the step has failed."""

    def call(
        self,
        method: str | bytes | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a public method of every worker, after the submitted plans, and return the results by rank. A
        function gets the worker as its first argument; a function packed by `pack_function` is bytes."""

    def sample_tokens(self, masks: Masks) -> None:
        """Sample the rows of the last plan, with these grammar masks for its constrained rows. Must be called
        before the next plan, and before the step is waited for."""

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        """Read an adapter on every worker while steps run. `watch` must be called until the future ends."""

    def drop(self, name: str) -> None:
        """Drop an adapter on every worker, after earlier reads of it."""

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        """Copy KV cache blocks to all devices while steps run. `watch` must be called until the future
        ends."""

    def read(self, read: BlockRead) -> Future[Any]:
        """Copy KV cache blocks of one rank for another engine while steps run, and return their bytes; they
        are empty if the blocks were written to memory of that engine. `watch` must be called until the
        future ends."""

    def watch(self) -> None:
        """Raise EngineDead if a worker is gone."""

    def close(self) -> None:
        """End all workers."""


class FailedStep:
    """A step that failed at submission; waiting for its result raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        raise self._error


__all__ = ["EXECUTORS", "Executor", "Pending", "FailedStep"]

EXECUTORS = LazyTable(
    "distributed_executor_backend",
    {
        "uni": "quire.executor.inprocess:InProcessExecutor",
        "mp": "quire.executor.multiprocess:MultiprocessExecutor",
        "ray": "quire.executor.ray:RayExecutor",
    },
)
