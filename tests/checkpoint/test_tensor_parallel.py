"""Tests of the tensor-parallel sizes that a model allows, and of each rank's shard."""

from dataclasses import replace

import pytest

from quire.checkpoint.facts import ArchFacts, LayerFacts, MlaFacts, MoeFacts, Routing, StateFacts
from quire.checkpoint.layout import cache_specs
from quire.checkpoint.tensor_parallel import check_divisible, shard_facts
from quire.errors import ConfigError
from quire.memory import activation_bytes

PLAIN = LayerFacts(rope=None)
FACTS = ArchFacts(
    architecture="LlamaForCausalLM",
    vocab=1001,
    hidden=64,
    intermediate=96,
    heads=32,
    kv_heads=8,
    head_dim=4,
    norm_eps=1e-5,
    layers=(PLAIN, PLAIN),
)
MOE = replace(
    FACTS,
    intermediate=50,  # unused: all layers are mixtures
    layers=(replace(PLAIN, moe=True),),
    moe=MoeFacts(experts=4, intermediate=24, routing=Routing(2), shared_intermediate=32),
)
STATE = replace(
    FACTS,
    layers=(replace(PLAIN, mixer="mamba"), PLAIN),
    state=StateFacts(heads=24, head_dim=4, state=8, groups=2, conv=4, norm_groups=2),
)


@pytest.mark.parametrize(
    ("facts", "size", "message"),
    [
        (FACTS, 3, "tensor_parallel_size=3 does not divide 32 attention heads; use 1, 2, 4, 8, 16 or 32"),
        (replace(FACTS, kv_heads=6, heads=12), 4, "6 key and value heads; use 1, 2, 3, 6 or 12"),
        (
            replace(FACTS, layers=(PLAIN, replace(PLAIN, heads=24))),
            16,
            "24 attention heads; use 1, 2, 4 or 8",
        ),
        (replace(FACTS, intermediate=90), 4, "90 numbers of the intermediate size; use 1 or 2"),
        (MOE, 16, "24 numbers of the experts' intermediate size; use 1, 2, 4 or 8"),
        (replace(MOE, moe=replace(MOE.moe, shared_intermediate=3)), 2, "3 numbers of the shared experts'"),  # type: ignore[type-var]
        (STATE, 16, "24 state heads; use 1, 2, 4 or 8"),
    ],
)
def test_size_that_does_not_divide_names_those_that_do(facts: ArchFacts, size: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_divisible(facts, size)
    assert message in str(error.value)


def test_valid_sizes_are_accepted() -> None:
    for facts in (FACTS, MOE, STATE):
        for size in (1, 2, 4, 8):
            check_divisible(facts, size)
    check_divisible(FACTS, 16)  # key and value heads are replicated
    check_divisible(MOE, 16, with_experts=False)
    latent = replace(FACTS, kv_heads=3, layers=(replace(PLAIN, mixer="latent"),), mla=MlaFacts(16, 4, 4, 4))
    check_divisible(latent, 4)


def test_facts_of_one_rank() -> None:
    assert shard_facts(FACTS, 1) is FACTS
    shard = shard_facts(FACTS, 4)
    assert (shard.heads, shard.kv_heads, shard.intermediate, shard.vocab) == (8, 2, 24, 1001)
    assert [spec.elements for spec in cache_specs(shard) if spec] == [8, 8]
    assert [spec.elements for spec in cache_specs(shard_facts(FACTS, 32)) if spec] == [4, 4]
    state = shard_facts(STATE, 4).state
    assert state is not None and (state.heads, state.groups) == (6, 1)
    moe = shard_facts(MOE, 4).moe
    assert moe is not None and (moe.intermediate, moe.shared_intermediate) == (6, 8)
    spread = shard_facts(MOE, 4, with_experts=False).moe
    assert spread is not None and (spread.intermediate, spread.shared_intermediate) == (24, 8)
    wider = replace(FACTS, layers=(PLAIN, replace(PLAIN, heads=48)))
    assert [layer.heads for layer in shard_facts(wider, 4).layers] == [0, 12]
    sizes = {"num_tokens": 512, "num_seqs": 1}
    assert activation_bytes(wider, "float32", **sizes) > activation_bytes(FACTS, "float32", **sizes)
    assert activation_bytes(shard, "float32", **sizes) < activation_bytes(FACTS, "float32", **sizes)
