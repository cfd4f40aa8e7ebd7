import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.layers.linear import ColumnLinear, GateUpLinear, QKVLinear, RowLinear
from quire.layers.scope import Loads, Scope
from quire.quant.unquantized import PlainWeight
from quire.quant.weight import LinearShape


def fill(layer: Loads) -> dict[str, Tensor]:
    """Fill the layer with random checkpoint tensors by name."""
    torch.manual_seed(0)
    tensors = {target.name: torch.randn(target.tensor.shape) for target in layer.targets()}
    for target in layer.targets():
        target.tensor.copy_(tensors[target.name])
    layer.finish()
    return tensors


def test_qkv_is_the_three_projections_of_the_checkpoint(scope: Scope) -> None:
    """Check the order and sizes of the parts."""
    layer = QKVLinear(12, 4, 2, 8, scope / "attn" / "qkv_proj", bias=True)
    tensors = fill(layer)
    x = torch.randn(5, 12)
    names = ["q_proj", "k_proj", "v_proj"]
    assert list(tensors) == [f"attn.{name}.{suffix}" for name in names for suffix in ("weight", "bias")]
    for name, actual in zip(names, layer.multiply(x).split([32, 16, 16], dim=1), strict=True):
        expected = F.linear(x, tensors[f"attn.{name}.weight"], tensors[f"attn.{name}.bias"])
        torch.testing.assert_close(actual, expected)


def test_gate_and_up_are_not_swapped(scope: Scope) -> None:
    layer = GateUpLinear(6, 10, scope / "mlp" / "gate_up_proj")
    tensors = fill(layer)
    x = torch.randn(3, 6)
    gate, up = (x @ tensors[f"mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
    torch.testing.assert_close(layer(x), F.silu(gate) * up)


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_single_layer_has_its_own_name(kind: type, bias: bool, scope: Scope) -> None:
    layer = kind(6, 4, scope / "mlp" / "down_proj", bias=bias)
    tensors = fill(layer)
    x = torch.randn(3, 6)
    assert list(tensors) == ["mlp.down_proj.weight"] + ["mlp.down_proj.bias"] * bias
    torch.testing.assert_close(layer(x), F.linear(x, *tensors.values()))


def test_format_is_chosen_by_the_names_of_the_parts(scope: Scope) -> None:
    """Check that the layer uses the scope's choice of format."""
    part_names: list[tuple[str, ...]] = []

    class Doubled(PlainWeight):
        def finish(self) -> None:
            self.product = lambda x: 2 * F.linear(x, self.weight)

    def choose(parts: tuple[str, ...], shape: LinearShape) -> PlainWeight:
        part_names.append(parts)
        return Doubled(shape)

    chosen = Scope(scope.dtype, scope.device, scope.backend, scope.max_len, linear=choose)
    layer = RowLinear(6, 4, chosen / "o_proj")
    weight = fill(layer)["o_proj.weight"]
    x = torch.randn(3, 6)
    GateUpLinear(6, 4, chosen / "mlp" / "gate_up_proj")
    assert part_names == [("o_proj",), ("mlp.gate_proj", "mlp.up_proj")]
    torch.testing.assert_close(layer(x), 2 * (x @ weight.T))
