"""Tests of expert parallelism: the layouts that a model allows, and the errors of others."""

from dataclasses import replace
from typing import Any

import pytest

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, Routing
from quire.config.expert_parallel import (
    Eplb,
    ep_size,
    process_group_address,
    step_sync_address,
    steps_together,
    with_experts,
)
from quire.config.sections import ParallelSection
from quire.errors import ConfigError

DENSE = ArchFacts(
    architecture="LlamaForCausalLM",
    vocab=64,
    hidden=64,
    intermediate=96,
    heads=8,
    kv_heads=8,
    head_dim=8,
    norm_eps=1e-5,
    layers=(LayerFacts(rope=None),),
)
MOE = replace(DENSE, moe=MoeFacts(experts=8, intermediate=24, routing=Routing(2)))


def settle(facts: ArchFacts = MOE, *, pools: bool = False, **settings: Any) -> ParallelSection:
    section = ParallelSection(device="cpu", cpu_threads=1, **settings)
    return with_experts(section, facts, settings, pools=pools)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_eplb": True}, "enable_eplb moves experts between devices: it needs enable_expert_parallel"),
        ({"eplb_config": {"num_redundant_experts": 2}}, "num_redundant_experts needs enable_eplb"),
        ({"eplb_config": {"window": 2}}, "unknown eplb_config key 'window'; known: window_size"),
        ({"eplb_config": {"window_size": 0}}, "window_size must be a whole number of at least 1, not 0"),
        ({"eplb_config": {"use_async": 1}}, "use_async must be true or false, not 1"),
        ({"all2all_backend": "deep"}, "unknown all2all_backend 'deep'; known: allgather_reducescatter"),
        ({"enable_expert_parallel": True, "data_parallel_size": 9}, "8 experts over .* = 9 devices"),
        (
            {
                "enable_expert_parallel": True,
                "data_parallel_size": 2,
                "distributed_executor_backend": "ray",
            },
            "workers that are started without",
        ),
        (
            {"enable_expert_parallel": True, "enable_eplb": True},
            "enable_eplb needs tensor_parallel_size or data_parallel_size above 1",
        ),
        (
            {"enable_expert_parallel": True, "enable_eplb": True, "tensor_parallel_size": 3},
            "8 experts and num_redundant_experts=0 cannot be divided over 3 devices.*use 1, 4, ...",
        ),
    ],
)
def test_impossible_layouts_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(**settings)


def test_dense_and_pooling_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="a LlamaForCausalLM has no experts to spread"):
        settle(DENSE, enable_expert_parallel=True, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size > 1 is not supported for a pooling model"):
        settle(pools=True, enable_expert_parallel=True, data_parallel_size=2)
    assert settle(DENSE, tensor_parallel_size=2).tensor_parallel_size == 2


def test_vllm_backend_names_are_mapped() -> None:
    for name, backend in {"pplx": "allgather_reducescatter", "deepep_low_latency": "all2all"}.items():
        assert settle(all2all_backend=name).all2all_backend == backend


def test_lockstep_engines_have_a_sync_address() -> None:
    one = settle(enable_expert_parallel=True, tensor_parallel_size=4)
    assert ep_size(one) == 4 and not steps_together(one)
    many = settle(
        enable_expert_parallel=True, tensor_parallel_size=2, data_parallel_size=2, data_parallel_rpc_port=500
    )
    assert ep_size(many) == 4 and steps_together(many)
    assert (process_group_address(many), step_sync_address(many)) == (
        "tcp://127.0.0.1:501",
        "tcp://127.0.0.1:502",
    )
    free = settle(enable_expert_parallel=True, data_parallel_size=2)
    assert free.data_parallel_rpc_port != one.data_parallel_rpc_port, (
        "two engines on one machine would share a port"
    )
    eplb = Eplb.of(settle(eplb_config={"window_size": 7}))
    assert (eplb.window_size, eplb.step_interval) == (7, 3000)
