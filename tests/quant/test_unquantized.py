"""Tests of optional fused operations of weights: their availability per device and their use by layers."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.facts import MoeFacts, Routing
from quire.kernels.cpu import native
from quire.kernels.cpu.linear import LinearProduct
from quire.kernels.ops import HeadEntry
from quire.layers.linear import GateUpLinear, Linear, QKVLinear
from quire.layers.mlp import MLP
from quire.layers.moe import ExpertRouter
from quire.layers.scope import Scope
from quire.quant.unquantized import PlainWeight
from quire.quant.weight import LinearShape, Weight

SHAPE = LinearShape(8, (6,), False, torch.float32, torch.device("cpu"))
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class FusedWeight(PlainWeight):
    """Has all fused operations, each with a distinct result."""

    def finish(self) -> None:
        super().finish()
        self.gated = lambda x: torch.full((1,), 1.0)
        self.entered = self.enter
        self.chosen = self.choose

    def enter(self, x: Tensor, entry: HeadEntry) -> Tensor | None:
        return torch.full((1,), 2.0) if len(x) == 1 else None

    def choose(self, x: Tensor, *, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.full((1,), 3.0), torch.full((1,), routing.per_token)


def made(shape: LinearShape, cache_dtype: torch.dtype | None = None) -> Weight:
    torch.manual_seed(0)
    weight = PlainWeight(shape, cache_dtype)
    weight.weight.copy_(torch.randn(6, 8))
    weight.finish()
    return weight


@pytest.fixture
def scope() -> Scope:
    backend = TorchSDPA()
    return Scope(
        SHAPE.dtype, SHAPE.device, backend, 64, linear=lambda parts, shape: FusedWeight(shape), name="a"
    )


def ready(layer: Linear) -> None:
    for target in layer.targets():
        target.tensor.normal_()
    layer.finish()


def test_cpu_has_no_fused_operations() -> None:
    weight = made(SHAPE)
    assert weight.gated is weight.entered is weight.chosen is None
    assert isinstance(weight.product, LinearProduct) == (native.library() is not None)


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
def test_rows_of_a_bfloat16_embedding_are_widened() -> None:
    """Check an embedding whose weight has another dtype than the model computes in."""
    narrow = made(SHAPE, torch.bfloat16)
    ids = torch.tensor([5, 0])
    assert narrow.rows is not None and narrow(X).dtype == torch.float32
    assert torch.equal(narrow.rows(ids), narrow.get_parameter("weight")[ids].float())


def test_torch_multiplies_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    weight = made(SHAPE)
    torch.testing.assert_close(weight(X), X @ weight.get_parameter("weight").T)


@pytest.mark.parametrize(("activation", "fused"), [("silu", True), ("gelu", False)])
def test_fused_activation_is_silu_only(activation: str, fused: bool, scope: Scope) -> None:
    layer = GateUpLinear(8, 6, scope, activation=activation)
    ready(layer)
    assert layer(X).shape == ((1,) if fused else (2, 6))


@pytest.mark.parametrize(
    ("num", "activation", "taken"), [(300, "silu", True), (2, "silu", False), (300, "gelu", False)]
)
def test_fused_activation_of_many_tokens(num: int, activation: str, taken: bool, scope: Scope) -> None:
    facts = SimpleNamespace(
        hidden=8, intermediate=6, fused_gate_up=False, mlp_bias=False, activation=activation
    )
    mlp = MLP(facts, scope)  # type: ignore[arg-type]
    ready(mlp.gate_up)
    ready(mlp.down)
    mlp.gate_up.gated = None
    mlp.down.of_gates = lambda gates: torch.tensor(gates.shape)
    assert (mlp(torch.randn(num, 8)).tolist() == [num, 12]) == taken


def test_fused_cache_write_is_skipped_if_it_does_not_fit(scope: Scope) -> None:
    """Check a weight that supports one token but not two."""
    layer, cache = QKVLinear(8, 2, 1, 4, scope), torch.zeros(1, 4, 1, 4)
    ready(layer)
    table, places = torch.zeros(8, 4), torch.arange(2)
    entries = [HeadEntry(2, table, places[:n], places[:n], cache, cache.clone(), None) for n in (1, 2)]
    assert layer(X[:1], entries[0]).tolist() == [2.0]
    assert layer(X, entries[1]).shape == (2, 2, 4)


def test_router_uses_the_fused_operation_of_its_weight(scope: Scope) -> None:
    layer = ExpertRouter(8, MoeFacts(experts=4, intermediate=8, routing=Routing(2)), scope)
    ready(layer)
    assert [float(part) for part in layer(X, None)] == [3.0, 2.0]


@pytest.mark.parametrize("in_c", [False, True], ids=["torch", "c"])
def test_float32_layer_does_not_round_bfloat16_inputs(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a router, whose choice depends on the last bits of its logits."""
    if not in_c:
        monkeypatch.setattr(native, "library", lambda: None)
    weight = made(SHAPE)
    assert isinstance(weight, PlainWeight)
    for x in (X, X.bfloat16()):
        torch.testing.assert_close(weight(x), x.float() @ weight.weight.T)
