"""Step3: attention with low-rank queries. Step-3.5, and the decoder of Step-3.7: a gate for each head."""

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.linear import ColumnLinear, HeadGate, Linear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import decoder_of
from quire.quant.sharding import Runs, of_heads


class LowRankQueries(nn.Module):
    """Multi-matrix factorization attention (MFA): queries are projected to a small vector, which has a norm,
    and from there to all heads, which share one key and value head."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        group, head_dim, rank = scope.group, facts.head_dim, facts.query_rank
        kv = of_heads(group, facts.kv_heads, head_dim)
        parts: dict[str, int | Runs] = {"q_proj": rank, "k_proj": (kv,), "v_proj": (kv,)}
        named = {(scope / name).name: part for name, part in parts.items()}
        self.down = Linear(facts.hidden, named, scope / "qkv_proj")
        self.sizes = rank, 2 * kv.size
        self.norm = RMSNorm(rank, facts.norm_eps, scope / "inter_norm")
        self.up = ColumnLinear(rank, facts.heads * head_dim, scope / "wq")
        spec = AttentionSpec(
            group.share(facts.heads), kv.size // head_dim, head_dim, scope.dtype, layer.window
        )
        self.ops = scope.ops
        self.mix = PagedAttention(spec, rope, scope)
        self.out = RowLinear(facts.heads * head_dim, facts.hidden, scope / "o_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        latent, keys_values = self.down.multiply(x, batch).split(self.sizes, 1)
        queries = self.up(self.norm.normalize(latent), batch)
        mixed = self.mix.attend(torch.cat((queries, keys_values), 1), batch)
        return self.out(mixed, batch)


Step3Text = decoder_of(llama.layer_with(LowRankQueries))


class GatedHeads(llama.Attention):
    """Llama attention with a scalar gate on the output of each head."""

    gate_name = "g_proj"

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.gate = HeadGate(facts.hidden, facts.heads, scope / self.gate_name)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(self.gate.scale(self.mix(x, self.qkv, batch), x, batch), batch)


Step35 = decoder_of(llama.layer_with(GatedHeads))
