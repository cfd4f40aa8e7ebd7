"""Expert parallelism: the settings, checked against the model."""

import socket
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.config.data_parallel import local_ranks
from quire.config.sections import ParallelSection
from quire.errors import ConfigError, check_keys, nearest
from quire.logs import get_logger, warn_once

log = get_logger(__name__)

GATHER, SEND = "allgather_reducescatter", "all2all"
_VLLM_BACKENDS = {
    "naive": GATHER,
    "pplx": GATHER,
    **dict.fromkeys(
        (
            "deepep_high_throughput",
            "deepep_low_latency",
            "deepep_v2",
            "mori",
            "mori_high_throughput",
            "mori_low_latency",
            "nixl_ep",
            "flashinfer_all2allv",
            "flashinfer_nvlink_one_sided",
            "flashinfer_nvlink_two_sided",
        ),
        SEND,
    ),
}
"""All-to-all backends of vLLM, each with the backend of Quire that replaces it."""


@dataclass(frozen=True, slots=True)
class Eplb:
    """Expert-parallel load balancing settings (`eplb_config`)."""

    window_size: int = 1000
    """Number of steps over which the tokens of each expert are counted."""
    step_interval: int = 3000
    """Steps between rebalancings."""
    num_redundant_experts: int = 0
    """Number of additional replicas of experts in each layer, over all devices."""
    use_async: bool = True
    """Whether to move one layer at a time between steps; otherwise all layers move at once."""
    log_balancedness: bool = False
    """Whether to log the balance of the load at each rebalancing."""

    @staticmethod
    def of(parallel: ParallelSection) -> "Eplb":
        known = {item.name: item for item in fields(Eplb)}
        check_keys("eplb_config", parallel.eplb_config, list(known))
        for name, value in parallel.eplb_config.items():
            kind, least = known[name].type, 0 if name == "num_redundant_experts" else 1
            if type(value) is not kind or (value is not False and value < least):
                what = "true or false" if kind is bool else f"a whole number of at least {least}"
                raise ConfigError(f"eplb_config: {name} must be {what}, not {value!r}")
        return Eplb(**parallel.eplb_config)


def ep_size(parallel: ParallelSection) -> int:
    """Return the number of devices that the experts of a layer are spread over."""
    if not parallel.enable_expert_parallel:
        return 1
    return parallel.tensor_parallel_size * parallel.data_parallel_size


def steps_together(parallel: ParallelSection) -> bool:
    """Return whether engines share experts, so that they must run every step together."""
    return parallel.enable_expert_parallel and parallel.data_parallel_size > 1


def process_group_address(parallel: ParallelSection) -> str:
    """Return the address of the process group over all devices of engines that step together."""
    return f"tcp://{parallel.data_parallel_address}:{parallel.data_parallel_rpc_port + 1}"


def step_sync_address(parallel: ParallelSection) -> str:
    """Return the address at which engines that step together synchronize their steps."""
    return f"tcp://{parallel.data_parallel_address}:{parallel.data_parallel_rpc_port + 2}"


def with_experts(
    parallel: ParallelSection, facts: ArchFacts, args: dict[str, Any], *, pools: bool
) -> ParallelSection:
    """Return the settings with the name of Quire's all-to-all backend and, if all engines are on this
    machine, a free data_parallel_rpc_port. Raise if the model or a setting does not support expert
    parallelism."""
    parallel = replace(parallel, all2all_backend=_resolve_backend(parallel.all2all_backend))
    eplb = Eplb.of(parallel)
    if not parallel.enable_expert_parallel:
        if parallel.enable_eplb:
            raise ConfigError("enable_eplb moves experts between devices: it needs enable_expert_parallel")
        if eplb.num_redundant_experts:
            raise ConfigError("eplb_config: num_redundant_experts needs enable_eplb")
        return parallel
    size, moe = ep_size(parallel), facts.moe
    if moe is None:
        raise ConfigError(
            f"enable_expert_parallel: a {facts.architecture} has no experts to spread; leave it out"
        )
    if facts.borrowed is not None:
        raise ConfigError(
            "enable_expert_parallel is not supported for a model that runs through transformers"
        )
    if moe.experts < size:
        raise ConfigError(
            f"enable_expert_parallel spreads {moe.experts} experts over tensor_parallel_size x "
            f"data_parallel_size = {size} devices: use at most {moe.experts}"
        )
    _check_eplb(parallel, eplb, moe.experts, size)
    if steps_together(parallel):
        if pools:
            raise ConfigError(
                "enable_expert_parallel with data_parallel_size > 1 is not supported for a pooling model"
            )
        if parallel.distributed_executor_backend == "ray":
            raise ConfigError(
                "enable_expert_parallel with data_parallel_size > 1 needs workers that are started without"
                " Ray: use distributed_executor_backend 'mp'"
            )
        all_local = len(local_ranks(parallel)) == parallel.data_parallel_size
        if all_local and "data_parallel_rpc_port" not in args:
            parallel = replace(parallel, data_parallel_rpc_port=_free_ports(3))
    return parallel


def _check_eplb(parallel: ParallelSection, eplb: Eplb, num_experts: int, size: int) -> None:
    redundant = eplb.num_redundant_experts
    if not parallel.enable_eplb:
        if redundant:
            raise ConfigError("eplb_config: num_redundant_experts needs enable_eplb")
        return
    if size == 1:
        raise ConfigError("enable_eplb needs tensor_parallel_size or data_parallel_size above 1")
    total = num_experts + redundant
    if total % size or redundant > num_experts * (size - 1):
        wanted = -num_experts % size
        raise ConfigError(
            f"enable_eplb: {num_experts} experts and num_redundant_experts={redundant} cannot be divided over"
            f" {size} devices, with no expert twice on one; use {wanted}, {wanted + size}, ..."
        )


def _resolve_backend(name: str) -> str:
    if name in (GATHER, SEND):
        return name
    if name not in _VLLM_BACKENDS:
        known = [GATHER, SEND, *_VLLM_BACKENDS]
        raise ConfigError(
            f"unknown all2all_backend {name!r}; known: {', '.join(known)}{nearest(name, known)}"
        )
    warn_once(log, f"all2all_backend {name!r} is not available; using {_VLLM_BACKENDS[name]!r} instead")
    return _VLLM_BACKENDS[name]


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        sockets = [socket.socket() for _ in range(count)]
        try:
            sockets[0].bind(("127.0.0.1", 0))
            first: int = sockets[0].getsockname()[1]
            for number, other in enumerate(sockets[1:], first + 1):
                other.bind(("127.0.0.1", number))
        except (OSError, OverflowError):
            continue
        finally:
            for sock in sockets:
                sock.close()
        return first
