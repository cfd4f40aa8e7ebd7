"""Llama 4: layers that turn queries and keys and layers that do not, dense ones and mixtures of experts.

Ministral 3, whose queries grow as these do, in all layers.
"""

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder, MakesLayer


def growth_of(growth: tuple[float, float] | None, first: int, scope: Scope) -> Tensor | None:
    """[max_len, 1]: what queries are multiplied with at each place, if the first is at `first`; None: none of
    them grows."""
    if growth is None or scope.max_len - 1 + first < growth[0]:
        return None
    step, factor = growth
    positions = torch.arange(scope.max_len, device=scope.device) + first
    return (torch.log1p(torch.floor(positions / step)) * factor + 1)[:, None]


class Attention(llama.Attention):
    """Where heads turn they are first made of one length; where they do not, queries grow with their
    position."""

    first_position, turning_too = 1, False
    """Of the first token; and whether queries that turn grow as well."""
    growth: Tensor | None

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.ops, growth = scope.ops, None
        if facts.query_growth is not None and (layer.rope is None or self.turning_too):
            growth = growth_of(facts.query_growth, self.first_position, scope)
        elif layer.rope is not None and facts.unit_heads:
            ones = torch.ones(facts.head_dim, dtype=scope.dtype, device=scope.device)
            self.mix.norms = HeadNorms(ones, ones, facts.norm_eps)
        self.register_buffer("growth", growth, persistent=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        growth = self.growth
        if growth is None:
            return super().forward(x, batch)

        def grown(x: Tensor, entry: HeadEntry) -> Tensor:
            q: Tensor = self.qkv(x, entry)
            self.ops.scale_rows(q.view(len(q), -1), self.ops.embed(batch.positions, growth))
            return q

        out: Tensor = self.out(self.mix(x, grown, batch))
        return out


class Layer(llama.Layer):
    """Attention, then feed-forward, each behind a norm and beside a residual."""

    Mixer: MakesLayer = Attention

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MoE(facts, scope) if layer.moe else MLP(facts, scope / "feed_forward")


class Llama4Model(Decoder):
    """The model."""

    Layer = Layer


class GrowingAttention(Attention):
    """All queries grow with their position."""

    first_position, turning_too = 0, True


class Ministral3Layer(llama.Layer):
    """Llama's, with queries that grow."""

    Mixer = GrowingAttention


class Ministral3(Decoder):
    """The model."""

    Layer = Ministral3Layer
