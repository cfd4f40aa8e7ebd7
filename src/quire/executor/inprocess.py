"""The executor of a single device, with the worker in this process."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.config.expert_parallel import process_group_address, steps_together
from quire.config.parallel import Rank
from quire.data.kv_tiers import BlockLoad, BlockRead, LoadDone
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.step_plan import Masks, StepPlan
from quire.errors import EngineDead
from quire.executor import Pending
from quire.executor.lora_loading import AdapterReading
from quire.executor.messages import NUM_LOADERS
from quire.executor.rpc import invoke
from quire.executor.tcp import interface_to
from quire.memory import CacheSize
from quire.parallel.world import World, join
from quire.worker.vllm_worker import open_worker


class InProcessExecutor:
    """A worker in this process, called directly."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = open_worker(config, _join_world(config))

    @property
    def driver_worker(self) -> Any:
        """Return the worker, under vLLM's name."""
        return self._worker

    def start(self) -> CacheSize:
        """Load the model, allocate its cache, and return the size of the cache."""
        return self._worker.start()

    def submit(self, plan: StepPlan) -> Pending:
        return self._worker.submit(plan)

    def call(
        self,
        method: str | bytes | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method or function without a time limit."""
        if not isinstance(method, str | bytes):
            return [method(self._worker, *args, **(kwargs or {}))]
        return [invoke(self._worker, method, args, kwargs or {})]

    def sample_tokens(self, masks: Masks) -> None:
        self._worker.sample_tokens(masks)

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        return self._reading.fetch(lora)

    def drop(self, name: str) -> None:
        self._reading.drop(name)

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        return self._loading.submit(self._worker.load_blocks, load)

    def read(self, read: BlockRead) -> Future[Any]:
        future = Future[Any]()
        future.set_result(self._worker.read_blocks(read))
        return future

    @cached_property
    def _loading(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_LOADERS, "quire-kv-load")

    def watch(self) -> None:
        """Return at once: a worker in this process cannot be gone."""

    @cached_property
    def _reading(self) -> AdapterReading:
        return AdapterReading(self._worker)

    def close(self) -> None:
        if "_reading" in self.__dict__:
            self._reading.close()
        if "_loading" in self.__dict__:
            self._loading.shutdown()
        self._worker.close()


def _join_world(config: EngineConfig) -> World:
    """Return a world of one rank, or join the engines that share experts."""
    parallel = config.parallel
    if not steps_together(parallel):
        return World()
    if interface := interface_to(parallel.data_parallel_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rank, device = Rank(dp=parallel.data_parallel_rank or 0), torch.device(config.machine.device)
    init_method, timeout_s = process_group_address(parallel), parallel.distributed_timeout_seconds
    try:
        return join(parallel, rank, init_method, device, timeout_s)
    except RuntimeError as error:
        raise EngineDead(
            f"engine {rank.dp} did not reach the other engines at {init_method} within {timeout_s} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
