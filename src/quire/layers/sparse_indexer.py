"""Indexer: which of the tokens before it each token sees, in layers with latent attention."""

import torch
from torch import Tensor, nn

from quire.attention import sparse_indices
from quire.attention.batch import Batch
from quire.attention.mla import turn
from quire.attention.sparse_indices import SparseIndices
from quire.checkpoint.facts import IndexFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope

_EPS = 1e-6


class SparseIndexer(nn.Module):
    """Queries of a few heads, a key that all of them share, and a weight of each head. It is the same on all
    devices."""

    def __init__(
        self, facts: IndexFacts, hidden: int, q_latent: int, rope_dim: int, rope: Rope, scope: Scope
    ) -> None:
        super().__init__()
        self.facts, self.rope, self.rope_dim = facts, rope, rope_dim
        self.q = WholeLinear(q_latent, facts.heads * facts.dim, scope / "wq_b")
        self.k = WholeLinear(hidden, facts.dim, scope / "wk")
        self.k_norm = LayerNorm(facts.dim, _EPS, scope / "k_norm")
        self.weights = WholeLinear(hidden, facts.heads, scope / "weights_proj")
        self.scale = (facts.heads * facts.dim) ** -0.5

    def forward(self, x: Tensor, q_latent: Tensor, keys: Tensor, batch: Batch) -> SparseIndices | None:
        """[T, hidden] and the [T, q_latent] that queries are made of. `keys` [num_blocks, block_size, dim]
        are given those of the tokens."""
        facts = self.facts
        queries = self._turned(self.q(q_latent).view(len(x), facts.heads, facts.dim), batch)
        own = self._turned(self.k_norm.alone(self.k(x))[:, None], batch)[:, 0]
        sparse_indices.keep(own, keys, batch.slots)
        weights = self.weights(x).float() * self.scale
        return sparse_indices.pick(queries, weights, keys, batch, facts.most)

    def _turned(self, x: Tensor, batch: Batch) -> Tensor:
        """The first numbers of each head turn."""
        table, places = self.rope.of(batch)
        cos, sin = table[places][:, None].chunk(2, -1)
        turning, rest = x.split([self.rope_dim, x.shape[-1] - self.rope_dim], -1)
        return torch.cat((turn(turning, cos, sin, self.facts.neighbours), rest), -1)
