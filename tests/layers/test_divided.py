"""What a device of a group has of each layer's weights: a share along the axis that targets name, or all."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from quire.config.facts import MoeFacts, Routing
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import ColumnLinear, GateUpLinear, Linear, QKVLinear, RowLinear
from quire.layers.moe import NAMES, Experts
from quire.layers.norm import RMSNorm
from quire.layers.scope import Group, Loads, Scope

MOE = MoeFacts(experts=3, intermediate=8, routing=Routing(2))


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
    "embedding": lambda scope: Embedding(10, 6, scope),
    "head": lambda scope: Head(10, 6, scope, bias=True).table,
    **{f"experts {names}": experts(names) for names in NAMES},
}
WHOLE = {
    "row": ["layer.bias"],
    "whole": ["a.weight", "a.bias", "b.weight", "b.bias"],
    "norm": ["layer.weight"],
}


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_share_is_smaller_along_its_axis_alone(kind: str, across: bool, scope: Scope) -> None:
    """An axis of the tensor before it was turned round, or of all experts for one; a bias added twice."""
    scope = replace(scope / "layer", across=across)
    alone, shared = (LAYERS[kind](replace(scope, group=Group(0, size))) for size in (1, 2))
    assert isinstance(alone, Loads) and isinstance(shared, Loads)
    whole = []
    for target, share in zip(alone.targets(), shared.targets(), strict=True):
        assert (target.name, target.axis) == (share.name, share.axis)
        shape = list(target.tensor.shape)
        if target.axis is None:
            assert not target.stacked
            whole.append(target.name)
        else:
            shape[target.axis] //= 2
            assert not share.stacked or sum(share.stacked) == shape[target.axis]
        assert list(share.tensor.shape) == shape
    if not kind.startswith("experts"):
        assert whole == WHOLE.get(kind, [])
    else:
        assert all("down" in name and name.endswith("bias") for name in whole)


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [
        ("qkv", ()),
        ("qkv in one", (32, 16, 16)),
        ("qkv by head", ()),
        ("gate_up in one", (8, 8)),
        ("experts granite", (8, 8)),
        ("experts llama4", (8, 8)),
        ("experts gpt_oss", ()),
    ],
)
def test_what_is_stored_as_one_is_divided_for_itself(
    kind: str, stacked: tuple[int, ...], scope: Scope
) -> None:
    """Half of query, key and value taken for half of the queries; what lies in turns taken for stacked."""
    layer = LAYERS[kind](scope / "layer")
    assert isinstance(layer, Loads)
    assert next(layer.targets()).stacked == stacked
