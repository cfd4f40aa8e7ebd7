"""Phi-3.5-MoE: two experts a token, the second chosen as if the first were not there."""

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts
from quire.layers.moe import ExpertRouter, MoE
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder


class SparseMixer(ExpertRouter):
    """Each of two experts is weighed by a softmax over those whose logits are about as large as its own."""

    def __init__(self, hidden: int, moe: MoeFacts, scope: Scope) -> None:
        super().__init__(hidden, moe, scope)
        self.spread = moe.spread

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = self.multiply(x).float()
        first, weight = self._best(logits, logits)
        second, other = self._best(logits.scatter(1, first, -torch.inf), logits)
        return torch.cat((first, second), 1).to(torch.int32), torch.cat((weight, other), 1)

    def _best(self, left: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best of what is left [T, experts], and its weight, [T, 1] each."""
        most, best = left.max(1, keepdim=True)
        far = (most - logits) / logits.abs().maximum(most) > self.spread
        return best, left.masked_fill(far, -torch.inf).softmax(1).gather(1, best)


class PhiMixture(MoE):
    """A mixture with that router."""

    Chooser = SparseMixer


class Layer(llama.Layer):
    """Llama's, with such a mixture."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PhiMixture(facts, scope)


class PhiMoE(Decoder):
    """The model."""

    Layer = Layer
