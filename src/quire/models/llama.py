"""Llama, and families that differ only in their facts: Mistral, Qwen, SmolLM, Granite, Phi, GLM."""

from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.linear import QKVLinear, RowLinear
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.norm import Norm, head_norms, norm_of
from quire.layers.qk_norm import NormedHeads, clipped
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models.decoder import Decoder, LayerFactory
from quire.quant.sharding import of_heads

_PARTS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """QKV projection, paged attention, output projection."""

    fused_name, out_name = "qkv_proj", "o_proj"
    num_inputs = 1
    """Number of concatenated hidden vectors that it reads per token."""
    Product: type[QKVLinear] = QKVLinear
    by_head = False
    """Whether the fused QKV is grouped by key head."""
    norm_names = ("q_norm", "k_norm")

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.qkv = self.Product(
            self.num_inputs * facts.hidden,
            facts.heads,
            facts.kv_heads,
            facts.head_dim,
            scope / "qkv_proj",
            bias=facts.qkv_bias,
            names=(self.fused_name,) if facts.fused_qkv else _PARTS[: 2 if layer.keys_are_values else 3],
            paired_dim=rope.paired_dim,
            by_head=self.by_head,
        )
        norms: list[Norm] = []
        by_layer = facts.qk_norm == "each" or (facts.qk_norm == "head" and facts.norm == "layer")
        if by_layer:
            self.qkv.bounded = NormedHeads(self.norm_names, self.qkv, facts, rope.paired_dim, scope)
        elif facts.qk_norm:
            for name, heads in zip(self.norm_names, (facts.heads, facts.kv_heads), strict=True):
                shard = of_heads(scope.group, heads, facts.head_dim)
                size = shard if facts.qk_norm == "all" else facts.head_dim
                norms.append(norm_of(facts, scope / name, size))
        spec = AttentionSpec(
            self.qkv.heads,
            self.qkv.kv_heads,
            facts.head_dim,
            scope.dtype,
            layer.window,
            scale=facts.attention_scale,
            softcap=facts.attention_softcap,
            sinks=facts.sinks,
            uses_alibi=bool(facts.alibi_slopes),
        )
        self.norms = nn.ModuleList(norms)
        self.mix = PagedAttention(spec, rope, scope, facts.alibi_slopes)
        (self.qkv if facts.qk_norm == "all" else self.mix).norms = head_norms(norms)
        if facts.qkv_clip is not None:
            self.qkv.bounded = clipped(facts.qkv_clip)
        self.out = RowLinear(
            facts.heads * facts.head_dim, facts.hidden, scope / self.out_name, bias=facts.out_bias
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.out(self.mix(x, self.qkv, batch))
        return out


def feed_forward(facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
    """Build the MoE block or the MLP of a layer. The scope is the layer's."""
    return MoE(facts, scope) if layer.moe else MLP(facts, scope / "mlp")


class Layer(nn.Module):
    """Pre-norm layer: attention, then MLP or experts, each with a residual."""

    Mixer: LayerFactory = Attention
    attention_name = "self_attn"
    norm_names = ("input_layernorm", "post_attention_layernorm")

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.ops = scope.ops
        self.scale = facts.residual_scale
        self.attention_norm = norm_of(facts, scope / self.norm_names[0])
        self.attention = self.mixer(facts, layer, rope, scope)
        self.mlp_norm = norm_of(facts, scope / self.norm_names[1])
        self.mlp = self.feed_forward(facts, layer, scope)

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        """Build the attention or SSM mixer of the layer. The scope is the layer's."""
        return self.Mixer(facts, layer, rope, scope / self.attention_name)

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return feed_forward(facts, layer, scope)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self._scaled(self.attention(x, batch)), residual)
        return self._scaled(self.mlp(x)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else self.ops.scale(x, self.scale)


class Llama(Decoder):
    """Llama decoder."""

    Layer = Layer
