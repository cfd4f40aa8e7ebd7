"""DeepSeek-V2 and V3, and by their facts Kimi-K2: latent attention, then experts."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.attention.latent import LatentSpec
from quire.config.facts import ArchFacts, LayerFacts, MlaFacts, RopeFacts
from quire.layers.latent import LatentAttention
from quire.layers.linear import ColumnLinear, Linear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope, mscale
from quire.layers.scope import Scope

_EPS = 1e-6
"""Of the norms of latents, whatever the others have."""


def score_scale(mla: MlaFacts, rope: RopeFacts) -> float:
    """1 / sqrt(query size), and what yarn adds to that."""
    stretch = mscale(rope, rope.mscale_all_dim) if rope.kind != "default" and rope.mscale_all_dim else 1.0
    return (mla.nope_dim + mla.rope_dim) ** -0.5 * stretch**2


class Attention(nn.Module):
    """Queries and a latent of each token, what is seen of all latents, and the way back."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        mla = facts.mla
        assert mla is not None
        spec = LatentSpec(
            facts.heads, mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.v_dim,
            score_scale(mla, layer.rope), mla.neighbours,
        )  # fmt: skip
        num_queries = facts.heads * spec.query_dim
        parts = {"q_a_proj" if mla.q_rank else "q_proj": mla.q_rank or num_queries}
        parts["kv_a_proj_with_mqa"] = spec.width
        names = {f"{scope.name}.{name}": size for name, size in parts.items()}
        self.down = Linear(facts.hidden, names, scope, bias=facts.qkv_bias)
        self.q_norm = RMSNorm(mla.q_rank, _EPS, scope / "q_a_layernorm") if mla.q_rank else None
        self.q_up = ColumnLinear(mla.q_rank, num_queries, scope / "q_b_proj") if mla.q_rank else None
        kv_norm = RMSNorm(mla.kv_rank, _EPS, scope / "kv_a_layernorm")
        self.mix = LatentAttention(spec, rope, kv_norm, scope / "kv_b_proj")
        self.out = RowLinear(facts.heads * mla.v_dim, facts.hidden, scope / "o_proj", bias=facts.out_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, kv = self.down.multiply(x).split(self.down.sizes_out, -1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q, None)[0])
        out: Tensor = self.out(self.mix(q, kv, batch))
        return out
