"""HunYuan V1, dense or with experts: Llama, but for norms of heads that have turned."""

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.facts import ArchFacts, LayerFacts
from quire.kernels.ops import Entry, HeadNorms
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder


class Attention(llama.Attention):
    """Queries and keys are made of one length before they turn, which is the same as after. Their weights
    come after; a score has the product of both, so that queries can carry the keys'."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.q_norm = norm_of(facts, scope / "query_layernorm", facts.head_dim)
        self.k_norm = norm_of(facts, scope / "key_layernorm", facts.head_dim)
        ones = torch.ones(facts.head_dim, dtype=scope.dtype, device=scope.device)
        self.mix.norms = HeadNorms(ones, ones, facts.norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.out(self.mix(x, self._weighed, batch))
        return out

    def _weighed(self, x: Tensor, entry: Entry) -> Tensor:
        q: Tensor = self.qkv(x, entry)
        return q * (self.q_norm.weight * self.k_norm.weight)


class Layer(llama.Layer):
    """Llama's, with such attention."""

    Mixer = Attention


class HunYuan(Decoder):
    """The model."""

    Layer = Layer
