"""HunYuan V1, dense or with experts: Llama with QK norms after RoPE."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.rope import Rope
from quire.layers.scope import Scope, Target
from quire.models import llama
from quire.models.decoder import decoder_of


class HeadWeights(nn.Module):
    """Product of the weights of the Q norm and the K norm. If only queries are scaled by it, attention scores
    are the same as with both norms' weights."""

    def __init__(self, head_dim: int, scope: Scope) -> None:
        super().__init__()
        self.names = (scope / "query_layernorm").name, (scope / "key_layernorm").name
        self.ops = scope.ops
        self.both = nn.Parameter(scope.empty(2, head_dim), requires_grad=False)

    def forward(self, q: Tensor) -> Tensor:
        """Scale queries [T, heads, head_dim] in place."""
        return self.ops.scale_columns(q.flatten(0, 1), self.both[0]).view_as(q)

    def targets(self) -> Iterator[Target]:
        for name, weight in zip(self.names, self.both, strict=True):
            yield Target(f"{name}.weight", weight)

    def finish(self) -> None:
        self.both[0].mul_(self.both[1])


class Attention(llama.Attention):
    """Llama attention with QK norms after RoPE. RoPE does not change lengths, so normalization runs before it
    and the weights are applied after it."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.weights = HeadWeights(facts.head_dim, scope)
        ones = torch.ones(facts.head_dim, dtype=scope.dtype, device=scope.device)
        self.mix.norms = HeadNorms(ones, ones, facts.norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(self.mix(x, self._project_qkv, batch), batch)

    def _project_qkv(self, x: Tensor, entry: HeadEntry, batch: Batch) -> Tensor:
        return self.weights(self.qkv(x, entry, batch))


HunYuan = decoder_of(llama.layer_with(Attention))
