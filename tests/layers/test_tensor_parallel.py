"""Tests of each rank's shard of a layer's weights: a part along the target's axis, or all."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from quire.checkpoint.facts import MoeFacts, Routing, StateFacts
from quire.errors import ConfigError
from quire.layers.embedding import Head, TokenEmbedding
from quire.layers.linear import ColumnLinear, GateUpLinear, Linear, QKVLinear, RowLinear
from quire.layers.moe import NAMES, Experts
from quire.layers.norm import RMSNorm
from quire.layers.scope import Loads, Scope, Target
from quire.layers.ssm import GatedDelta, Mamba2Mixer
from quire.loader.source import put
from quire.parallel.group import Group
from quire.quant.sharding import Shard, check_units, of_heads, padded

MOE = MoeFacts(experts=3, intermediate=8, routing=Routing(2))
STATE = StateFacts(heads=8, head_dim=2, state=4, groups=2, conv=3)


def experts(names: str) -> Callable[[Scope], nn.Module]:
    moe = replace(MOE, names=names, expert_bias=names in ("apart", "gpt_oss"))
    return lambda scope: Experts(moe, 6, "silu", scope)


LAYERS: dict[str, Callable[[Scope], nn.Module]] = {
    "column": lambda scope: ColumnLinear(6, 8, scope, bias=True),
    "row": lambda scope: RowLinear(8, 6, scope, bias=True),
    "whole": lambda scope: Linear(6, {"a": 4, "b": 2}, scope, bias=True),
    "qkv": lambda scope: QKVLinear(6, 4, 2, 8, scope, bias=True),
    "gate_up": lambda scope: GateUpLinear(6, 8, scope),
    "qkv in one": lambda scope: QKVLinear(6, 4, 2, 8, scope, bias=True, names=("qkv",)),
    "qkv by head": lambda scope: QKVLinear(6, 4, 4, 8, scope, names=("qkv",), by_head=True),
    "gate_up in one": lambda scope: GateUpLinear(6, 8, scope, names=("gate_up",)),
    "norm": lambda scope: RMSNorm(6, 1e-5, scope),
    "embedding": lambda scope: TokenEmbedding(10, 6, scope),
    "head": lambda scope: Head(10, 6, scope, bias=True).table,
    "mamba": lambda scope: Mamba2Mixer(6, STATE, 1e-5, scope),
    "delta": lambda scope: GatedDelta(6, STATE, 1e-5, scope, grouped=True).into,
    **{f"experts {names}": experts(names) for names in NAMES},
}
WHOLE = {
    "row": ["layer.bias"],
    "whole": ["a.weight", "a.bias", "b.weight", "b.bias"],
    "norm": ["layer.weight"],
}


def targets_of(kind: str, scope: Scope, group: Group) -> dict[str, Target]:
    layer = LAYERS[kind](replace(scope, group=group))
    assert isinstance(layer, Loads)
    return {target.name: target for target in layer.targets()}


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_shards_cover_the_stored_weights(kind: str, across: bool, scope: Scope) -> None:
    """Check axes of transposed tensors and single experts, missing and duplicate parts, and fused QKV."""
    scope = replace(scope / "layer", transposed=across and "mamba" not in kind)
    alone = targets_of(kind, scope, Group())
    shared = [targets_of(kind, scope, Group(rank, 2)) for rank in range(2)]
    full = []
    for name, target in alone.items():
        assert target.is_whole
        numbers = torch.arange(float(target.tensor.numel())).view(target.shape)
        seen: list[Tensor] = []
        for item in shared:
            share = item[name]
            assert share.shape == target.shape
            share.tensor.fill_(torch.nan)
            put(numbers, share)
            seen.append(share.tensor.flatten())
        if all(item[name].is_whole for item in shared):
            full.append(name)
        elif kind != "embedding" and kind != "head":
            assert all(len(part) == numbers.numel() // 2 for part in seen)
            assert sorted(torch.cat(seen).tolist()) == numbers.flatten().tolist()
    if not kind.startswith("experts"):
        assert full == WHOLE.get(kind, [])
    else:
        assert all("down" in name and name.endswith("bias") for name in full)


@pytest.mark.parametrize(
    ("kind", "spans"),
    [
        ("qkv", [(16, 32)]),
        ("qkv in one", [(16, 32), (40, 48), (56, 64)]),
        ("qkv by head", [(48, 96)]),
        ("gate_up in one", [(4, 8), (12, 16)]),
        ("experts granite", [(4, 8), (12, 16)]),
        ("experts llama4", [(4, 8), (12, 16)]),
        ("experts gpt_oss", [(8, 16)]),
    ],
)
def test_fused_tensors_are_sharded_per_part(kind: str, spans: list[tuple[int, int]], scope: Scope) -> None:
    """Check interleaved against concatenated parts."""
    first = next(iter(targets_of(kind, scope / "layer", Group(1, 2)).values()))
    assert [(span.start, span.stop) for span, _ in first.spans()] == spans


def test_kv_heads_are_replicated_on_adjacent_ranks() -> None:
    assert [of_heads(Group(rank, 4), 2, 8).start for rank in range(4)] == [0, 0, 8, 8]
    assert of_heads(Group(3, 4), 2, 8) == Shard(8, 8, 16)
    assert of_heads(Group(1, 2), 4, 8) == Shard(16, 16, 32)


def test_group_of_heads_may_be_shared(scope: Scope) -> None:
    """Check four ranks and two groups of key heads: queries and keys of one, half of its values and gates."""
    targets = targets_of("delta", scope / "layer", Group(3, 4))
    spans = [(span.start, span.stop) for span, _ in targets["layer.in_proj_qkvz.weight"].spans()]
    # A group has 4 of q, 4 of k, 8 of v and 8 of z.
    assert [span for span in spans if span[0] < span[1]] == [(24, 28), (28, 32), (36, 40), (44, 48)]


def test_last_shard_of_a_vocabulary_is_padded(scope: Scope) -> None:
    assert [padded(Group(rank, 4), 10) for rank in range(4)] == [
        Shard(3, 0, 10),
        Shard(3, 3, 10),
        Shard(3, 6, 10),
        Shard(3, 9, 10),
    ]
    (target,) = targets_of("embedding", scope, Group(3, 4)).values()
    target.tensor.fill_(torch.nan)
    put(torch.ones(10, 6), target)
    assert target.tensor[:, 0].tolist() == [1, 0, 0]


def test_unsplittable_tensors_are_not_sharded() -> None:
    check_units("a", [Shard(128, 128, 256), Shard(5), Shard(64, 0, 64)], 128, "blocks")
    with pytest.raises(ConfigError, match=r"^a: blocks of 128 do not fit.* 192 out of 768.* 1, 2, 3 or 6,"):
        check_units("a", [Shard(192, 192, 768)], 128, "blocks")
