"""MLP blocks, gated and plain."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.kernels import batch_invariant
from quire.layers.linear import ColumnLinear, GateUpLinear, RowLinear
from quire.layers.scope import Scope

_MANY = 256
"""Number of tokens above which gate and up run as a GEMM without fused activation, if the weight of `down`
has a kernel that computes the activation (`of_gates`)."""

_NAMES, _FUSED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")


class MLP(nn.Module):
    """Gated MLP, down(act(gate(x)) * up(x)). `names` are the checkpoint names, `down` last; by default
    Llama's or, for a fused gate and up, Phi-3's. `sums` is whether the output is all-reduced, and
    `has_up_bias` whether a bias of the MLP includes gate and up."""

    def __init__(
        self,
        facts: ArchFacts,
        scope: Scope,
        *,
        intermediate: int = 0,
        names: tuple[str, ...] = _NAMES,
        sums: bool = True,
        has_up_bias: bool = True,
    ) -> None:
        super().__init__()
        inner = intermediate or facts.intermediate
        *gate_up, down = _FUSED if facts.fused_gate_up and names == _NAMES else names
        self.gate_up = GateUpLinear(
            facts.hidden,
            inner,
            scope / "gate_up_proj",
            bias=facts.mlp_bias and has_up_bias,
            activation=facts.activation,
            names=tuple(gate_up),
        )
        self.down = RowLinear(inner, facts.hidden, scope / down, bias=facts.mlp_bias, sums=sums)

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        of_gates = self.down.of_gates
        fits = len(x) > _MANY and self.gate_up.activation == "silu" and self.down.adapters_of(batch) is None
        fits = fits and not batch_invariant.is_on()  # the activation would not be rounded
        if of_gates is not None and fits:
            return of_gates(self.gate_up.multiply(x, batch))
        return self.down(self.gate_up(x, batch), batch)


class PlainMLP(nn.Module):
    """Plain MLP, down(act(up(x))). `names` are the checkpoint names; `sums` is whether the output is
    all-reduced."""

    def __init__(
        self,
        facts: ArchFacts,
        scope: Scope,
        *,
        names: tuple[str, ...],
        intermediate: int = 0,
        sums: bool = True,
    ) -> None:
        super().__init__()
        up, down = names
        inner = intermediate or facts.intermediate
        self.ops = scope.ops
        self.activation = facts.activation
        self.up = ColumnLinear(facts.hidden, inner, scope / up, bias=facts.mlp_bias)
        self.down = RowLinear(inner, facts.hidden, scope / down, bias=facts.mlp_bias, sums=sums)

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        return self.down(self.ops.activate(self.up(x, batch), self.activation), batch)
