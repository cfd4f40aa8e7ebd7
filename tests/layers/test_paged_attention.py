import pytest
import torch
from torch import nn

from quire.layers.attention import PagedAttention, attention_layers
from quire.layers.scope import Scope


def test_layers_are_found_in_the_order_of_the_model(scope: Scope) -> None:
    """Caches bound to the wrong layers would go unnoticed until a prefix is shared between processes."""
    layers = [PagedAttention(4, 2, 8, scope / "attn", window=window) for window in (None, 3, 7)]
    model = nn.Sequential(nn.Sequential(layers[0], nn.Identity()), *layers[1:])
    assert [layer.spec.window for layer in attention_layers(model)] == [None, 3, 7]


def test_a_cache_of_the_wrong_shape_is_refused(scope: Scope) -> None:
    layer = PagedAttention(4, 2, 8, scope / "attn")
    good, bad = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 4, 8)
    layer.bind(good, good)
    with pytest.raises(AssertionError):
        layer.bind(bad, bad)
