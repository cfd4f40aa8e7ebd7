"""Apertus: Llama with a plain MLP and a learned activation (xIELU)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import PlainMLP
from quire.layers.scope import Scope, Target
from quire.models import llama
from quire.models.decoder import decoder_of

_SLOPE = 0.5
"""Slope of xIELU at 0 (beta)."""
_BELOW = -1e-6


class XIELU(nn.Module):
    """xIELU activation: quadratic above 0, exponential below, with learned factors (arXiv 2411.13010)."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.above = nn.Parameter(scope.empty(1), requires_grad=False)
        self.below = nn.Parameter(scope.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=_BELOW)) - x) * self.below
        return torch.where(x > 0, self.above * x * x, below) + _SLOPE * x

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.alpha_p", self.above)
        yield Target(f"{self.name}.alpha_n", self.below)

    def finish(self) -> None:
        self.above.copy_(F.softplus(self.above))
        self.below.copy_(F.softplus(self.below) + _SLOPE)


class XIELUMLP(PlainMLP):
    """Plain MLP: down(xIELU(up(x)))."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, names=("up_proj", "down_proj"))
        self.activate = XIELU(scope / "act_fn")

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        return self.down(self.activate(self.up(x, batch)), batch)


class Layer(llama.Layer):
    """Llama layer with an xIELU MLP."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return XIELUMLP(facts, scope / "mlp")


Apertus = decoder_of(Layer, norms=("attention_layernorm", "feedforward_layernorm"))
