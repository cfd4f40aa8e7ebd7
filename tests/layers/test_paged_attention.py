import pytest
import torch
from torch import nn

from quire.attention.backend import AttentionSpec
from quire.checkpoint.facts import RopeFacts
from quire.layers.attention import PagedAttention, attention_layers
from quire.layers.rope import Rope
from quire.layers.scope import Scope


def make(scope: Scope, window: int | None = None) -> PagedAttention:
    rope = Rope(RopeFacts(theta=10000.0, dim=8, max_len=64), scope)
    return PagedAttention(AttentionSpec(4, 2, 8, scope.dtype, window), rope, scope / "attn")


def test_layers_are_listed_in_model_order(scope: Scope) -> None:
    """Check the order by which caches are bound to layers."""
    layers = [make(scope, window) for window in (None, 3, 7)]
    model = nn.Sequential(nn.Sequential(layers[0], nn.Identity()), *layers[1:])
    assert [layer.spec.window for layer in attention_layers(model.modules())] == [None, 3, 7]


def test_cache_of_the_wrong_shape_is_rejected(scope: Scope) -> None:
    layer = make(scope)
    good, bad = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 4, 8)
    layer.bind(good, good)
    with pytest.raises(AssertionError):
        layer.bind(bad, bad)
