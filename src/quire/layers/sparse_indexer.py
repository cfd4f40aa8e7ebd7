"""Sparse indexer (DeepSeek-V3.2): selects the earlier tokens that each token attends to in MLA layers."""

import torch
from torch import Tensor, nn

from quire.attention import sparse_indices
from quire.attention.batch import Batch
from quire.attention.mla import rotate
from quire.attention.sparse_indices import SparseIndices
from quire.checkpoint.facts import IndexFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope

_EPS = 1e-6


class SparseIndexer(nn.Module):
    """Projections of the indexer: queries of a few heads, one shared key, and a weight per head. Replicated
    on all devices."""

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
        """Write the keys of x [T, hidden] to the cache `keys` [num_blocks, block_size, dim], and return the
        tokens that the queries of `q_latent` [T, q_latent] select."""
        facts = self.facts
        queries = self._rotate(self.q(q_latent).view(len(x), facts.heads, facts.dim), batch)
        new_keys = self._rotate(self.k_norm.alone(self.k(x))[:, None], batch)[:, 0]
        sparse_indices.keep(new_keys, keys, batch.slots)
        weights = self.weights(x).float() * self.scale
        return sparse_indices.pick(queries, weights, keys, batch, facts.top_k)

    def _rotate(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply RoPE to the first `rope_dim` dimensions of each head."""
        table, positions = self.rope.of(batch)
        cos, sin = table[positions][:, None].chunk(2, -1)
        rotary, rest = x.split([self.rope_dim, x.shape[-1] - self.rope_dim], -1)
        return torch.cat((rotate(rotary, cos, sin, self.facts.rope_pairs), rest), -1)
