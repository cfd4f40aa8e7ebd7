"""Abilities of weights: what is there on a device, and that layers use them."""

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
from quire.quant.plain import PlainWeight
from quire.quant.weight import LinearShape, Weight

SHAPE = LinearShape(8, (6,), False, torch.float32, torch.device("cpu"))
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Able(PlainWeight):
    """Has all abilities, each with an answer of its own."""

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
    return Scope(SHAPE.dtype, SHAPE.device, backend, 64, linear=lambda parts, shape: Able(shape), name="a")


def ready(layer: Linear) -> None:
    for target in layer.targets():
        target.tensor.normal_()
    layer.finish()


def test_a_cpu_has_no_fused_products() -> None:
    weight = made(SHAPE)
    assert weight.gated is weight.entered is weight.chosen is None
    assert isinstance(weight.product, LinearProduct) == (native.library() is not None)


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
def test_rows_of_a_narrow_weight_are_wide() -> None:
    """An embedding in the type of its weight, where the model computes in another."""
    narrow = made(SHAPE, torch.bfloat16)
    ids = torch.tensor([5, 0])
    assert narrow.rows is not None and narrow(X).dtype == torch.float32
    assert torch.equal(narrow.rows(ids), narrow.get_parameter("weight")[ids].float())


def test_without_native_kernels_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    weight = made(SHAPE)
    torch.testing.assert_close(weight(X), X @ weight.get_parameter("weight").T)


@pytest.mark.parametrize(("activation", "fused"), [("silu", True), ("gelu", False)])
def test_the_activated_product_is_of_silu_alone(activation: str, fused: bool, scope: Scope) -> None:
    layer = GateUpLinear(8, 6, scope, activation=activation)
    ready(layer)
    assert layer(X).shape == ((1,) if fused else (2, 6))


@pytest.mark.parametrize(
    ("num", "activation", "taken"), [(300, "silu", True), (2, "silu", False), (300, "gelu", False)]
)
def test_many_tokens_are_activated_by_who_takes_them(
    num: int, activation: str, taken: bool, scope: Scope
) -> None:
    facts = SimpleNamespace(
        hidden=8, intermediate=6, fused_gate_up=False, mlp_bias=False, activation=activation
    )
    mlp = MLP(facts, scope)  # type: ignore[arg-type]
    ready(mlp.gate_up)
    ready(mlp.down)
    mlp.gate_up.gated = None
    mlp.down.of_gates = lambda gates: torch.tensor(gates.shape)
    assert (mlp(torch.randn(num, 8)).tolist() == [num, 12]) == taken


def test_a_way_into_the_cache_that_does_not_fit_is_not_taken(scope: Scope) -> None:
    """Fits one token, not two; those go by the product."""
    layer, cache = QKVLinear(8, 2, 1, 4, scope), torch.zeros(1, 4, 1, 4)
    ready(layer)
    table, places = torch.zeros(8, 4), torch.arange(2)
    entries = [HeadEntry(2, table, places[:n], places[:n], cache, cache.clone(), None) for n in (1, 2)]
    assert layer(X[:1], entries[0]).tolist() == [2.0]
    assert layer(X, entries[1]).shape == (2, 2, 4)


def test_a_router_asks_its_weight(scope: Scope) -> None:
    layer = ExpertRouter(8, MoeFacts(experts=4, intermediate=8, routing=Routing(2)), scope)
    ready(layer)
    assert [float(part) for part in layer(X, None)] == [3.0, 2.0]


@pytest.mark.parametrize("in_c", [False, True], ids=["torch", "c"])
def test_a_layer_in_float32_does_not_round_what_it_makes_of_narrower_numbers(
    in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router whose logits decide by their last bits."""
    if not in_c:
        monkeypatch.setattr(native, "library", lambda: None)
    weight = made(SHAPE)
    assert isinstance(weight, PlainWeight)
    for x in (X, X.bfloat16()):
        torch.testing.assert_close(weight(x), x.float() @ weight.weight.T)
