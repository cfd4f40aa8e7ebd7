"""Llama 4: layers with and without RoPE (NoPE), dense layers and MoE layers.

Ministral 3: Llama with the temperature scaling of queries by position in all layers.
"""

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import decoder_of


def temperature_scales(temperature: tuple[float, float] | None, first: int, scope: Scope) -> Tensor | None:
    """Return the query scales 1 + factor * log(1 + floor(position / step)), [max_len, 1], for positions from
    `first` on; None if all are 1. `temperature` is (step, factor)."""
    if temperature is None or scope.max_len - 1 + first < temperature[0]:
        return None
    step, factor = temperature
    positions = torch.arange(scope.max_len, device=scope.device) + first
    return (torch.log1p(torch.floor(positions / step)) * factor + 1)[:, None]


class Attention(llama.Attention):
    """Llama attention. With RoPE, queries and keys are first normed without a weight; without RoPE, queries
    are scaled by position."""

    first_position, scales_rope_layers = 1, False
    """Position of the first token in the formula of query scales, and whether the queries of layers with RoPE
    are scaled as well."""
    query_scales: Tensor | None

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.ops, query_scales = scope.ops, None
        if facts.attention_temperature is not None and (layer.rope is None or self.scales_rope_layers):
            query_scales = temperature_scales(facts.attention_temperature, self.first_position, scope)
        elif layer.rope is not None and facts.qk_l2_norm:
            ones = torch.ones(facts.head_dim, dtype=scope.dtype, device=scope.device)
            self.mix.norms = HeadNorms(ones, ones, facts.norm_eps)
        self.register_buffer("query_scales", query_scales, persistent=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(self.attend(x, batch), batch)

    def attend(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the attention output of all heads [T, heads * head_dim]."""
        query_scales = self.query_scales
        if query_scales is None:
            return self.mix(x, self.qkv, batch)

        def project(x: Tensor, entry: HeadEntry, batch: Batch) -> Tensor:
            q: Tensor = self.qkv(x, entry, batch)
            self.ops.scale_rows(q.view(len(q), -1), self.ops.embed(batch.positions, query_scales))
            return q

        return self.mix(x, project, batch)


Llama4Model = decoder_of(llama.layer_with(Attention), mlp="feed_forward")


class ScaledQueryAttention(Attention):
    """Llama attention with queries scaled by position in all layers."""

    first_position, scales_rope_layers = 0, True


Ministral3 = decoder_of(llama.layer_with(ScaledQueryAttention))
