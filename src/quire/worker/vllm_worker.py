"""The worker with the names of vLLM, and with the methods of the operator's extension class."""

import multiprocessing
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.extensions import load_class
from quire.errors import ConfigError
from quire.parallel.world import World
from quire.worker.extensions import ConfigView, VllmConfig
from quire.worker.worker import Worker

_INSTANCE_NAMES = frozenset(
    ("config", "world", "device", "loaded", "dtype", "adapters", "balancer", "local_rank")
)
"""Attributes that instances of a worker have, but its class does not; extension classes must not define
them."""


class ModelRunner:
    """The attributes of vLLM's model runner that extensions of workers read."""

    def __init__(self, worker: Worker, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.model_config, self.load_config = vllm_config.model_config, vllm_config.load_config
        self.device = worker.device
        self.model = VllmModel(worker)

    def get_model(self) -> "VllmModel":
        return self.model


class VllmModel:
    """The loaded model, with vLLM's method that changes weights. It is an instance of the model's class for
    `isinstance`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._worker.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker.model, name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Change weights in place, by their names in the checkpoint; return the names."""
        return self._worker.weights.load(weights)


class WorldGroup(NamedTuple):
    """A group of ranks of an engine, as the functions of `vllm.distributed.parallel_state` return it."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def rank_in_group(self) -> int:
        return self.rank


class VllmWorker(Worker):
    """A worker with vLLM's names, which functions and extension classes read."""

    local_rank: int = 0

    @cached_property
    def vllm_config(self) -> VllmConfig:
        return VllmConfig(self.config)

    @property
    def model_config(self) -> ConfigView:
        return self.vllm_config.model_config

    @property
    def parallel_config(self) -> ConfigView:
        return self.vllm_config.parallel_config

    @property
    def rank(self) -> int:
        return replace(self.world.rank, dp=0).index(self.config.parallel)

    @cached_property
    def model_runner(self) -> ModelRunner:
        return ModelRunner(self, self.vllm_config)

    def reload_weights(self) -> None:
        """Raise a NotImplementedError, which trainers expect from vLLM: `wake_up` restores the weights, and
        reading the checkpoint again would drop those of the trainer."""
        raise NotImplementedError("the weights need no reloading: wake_up has restored them")

    def get_model(self) -> Any:
        return self.model_runner.model


def open_worker(config: EngineConfig, world: World, local_rank: int = 0) -> VllmWorker:
    """Build a worker, with the methods of the operator's extension class."""
    worker_class: Any = VllmWorker
    if path := config.extensions.worker_extension_cls:
        extension = load_class(path, "worker_extension_cls")
        known = set(dir(VllmWorker)) | _INSTANCE_NAMES
        shared = sorted(name for name in dir(extension) if not name.startswith("__") and name in known)
        if shared:
            raise ConfigError(
                f"worker_extension_cls: {path!r} has names that the worker has already: {', '.join(shared)};"
                " rename them"
            )
        worker_class = type("ExtendedWorker", (extension, VllmWorker), {})
    # An extension may have a `__new__` that expects the arguments of vLLM's workers.
    rank = replace(world.rank, dp=0).index(config.parallel)
    worker: VllmWorker = worker_class.__new__(
        worker_class, vllm_config=VllmConfig(config), local_rank=local_rank, rank=rank
    )
    worker.__init__(config, world)  # type: ignore[misc]
    worker.local_rank = local_rank
    parallel, place = config.parallel, world.rank
    _opened[:] = [
        WorldGroup(rank, worker.parallel_config.world_size, local_rank),
        WorldGroup(place.tp, parallel.tensor_parallel_size, local_rank),
        WorldGroup(place.pp, parallel.pipeline_parallel_size, local_rank),
    ]
    if path and multiprocessing.parent_process() is not None and not dist.is_initialized():
        # Extensions that were written for vLLM ask torch.distributed for their rank.
        store: Any = getattr(dist, "HashStore")()  # noqa: B009 (the stubs do not export it)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return worker


_opened: list[WorldGroup] = []
"""All ranks, the tensor parallel ranks and the pipeline stages of the worker that was opened last in this
process; empty without a worker."""


def get_world_group() -> WorldGroup:
    """Return the ranks of the engine, for extensions and functions that run in a worker."""
    return _group(0)


def get_tp_group() -> WorldGroup:
    """Return the worker's number among its tensor parallel ranks, and their number."""
    return _group(1)


def get_pp_group() -> WorldGroup:
    """Return the worker's pipeline stage, and the number of stages."""
    return _group(2)


def _group(index: int) -> WorldGroup:
    if not _opened:
        raise RuntimeError("there is no worker in this process, so that it has no rank")
    return _opened[index]


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size
