import torch
from torch import nn

from quire.layers.embedding import Head, TokenEmbedding
from quire.layers.linear import ColumnLinear, GateUpLinear, QKVLinear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Loads, Scope


def test_names_are_dotted_without_a_leading_dot(scope: Scope) -> None:
    child = scope / "model" / "layers" / 3 / "mlp"
    assert child.name == "model.layers.3.mlp"
    assert child.sibling("attn") == "model.layers.3.attn"
    assert (scope / "lm_head").sibling("other") == "other"


def test_child_inherits_everything_except_the_name(scope: Scope) -> None:
    child = scope / "a"
    assert (child.dtype, child.device, child.backend, child.max_len) == (
        scope.dtype,
        scope.device,
        scope.backend,
        scope.max_len,
    )
    assert scope.name == ""


def test_every_layer_with_weights_can_be_loaded(scope: Scope) -> None:
    """Check that every parameter is reached by a target and not left uninitialized."""
    embedding = TokenEmbedding(8, 4, scope / "embed")
    layers: list[nn.Module] = [
        embedding,
        Head(8, 4, scope / "lm_head").table,
        RMSNorm(4, 1e-5, scope / "norm"),
        ColumnLinear(4, 6, scope / "a", bias=True),
        RowLinear(4, 6, scope / "b"),
        QKVLinear(4, 2, 1, 4, scope / "qkv", bias=True),
        GateUpLinear(4, 6, scope / "gate_up"),
    ]
    for layer in layers:
        assert isinstance(layer, Loads)
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
        for target in layer.targets():
            target.tensor.fill_(1.0)
        assert all(bool((parameter == 1).all()) for parameter in layer.parameters())
        layer.finish()
    assert not isinstance(nn.Linear(2, 2), Loads)
