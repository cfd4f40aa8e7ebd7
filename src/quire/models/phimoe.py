"""Phi-3.5-MoE: two experts per token, chosen one after the other by the SparseMixer router."""

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts
from quire.layers.expert_router import ExpertRouter
from quire.layers.moe import MoE
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import decoder_of


class SparseMixer(ExpertRouter):
    """Router of two experts: the weight of each is a softmax over the experts with similar logits."""

    def __init__(self, hidden: int, moe: MoeFacts, scope: Scope) -> None:
        super().__init__(hidden, moe, scope)
        self.jitter = moe.sparsemixer_threshold

    def choose(self, x: Tensor, bias: Tensor | None, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        logits = self.multiply(x, batch).float()
        first, weight = self._choose_best(logits, logits)
        second, other = self._choose_best(logits.scatter(1, first, -torch.inf), logits)
        return torch.cat((first, second), 1).to(torch.int32), torch.cat((weight, other), 1)

    def _choose_best(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the id and the weight, [T, 1] each, of the expert with the largest of the `remaining` logits
        [T, experts], in which a chosen expert is masked."""
        most, best = remaining.max(1, keepdim=True)
        far = (most - logits) / logits.abs().maximum(most) > self.jitter
        return best, remaining.masked_fill(far, -torch.inf).softmax(1).gather(1, best)


class PhiMixture(MoE):
    """MoE block with the SparseMixer router."""

    Chooser = SparseMixer


class Layer(llama.Layer):
    """Llama layer with Phi's MoE block."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PhiMixture(facts, scope)


PhiMoE = decoder_of(Layer)
