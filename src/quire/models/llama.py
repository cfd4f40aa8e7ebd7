"""Llama, and families that differ only in their hyperparameters: Mistral, Qwen, SmolLM, Granite, Phi, GLM."""

from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.linear import QKVLinear, RowLinear
from quire.layers.mlp import MLP, PlainMLP
from quire.layers.moe import MoE
from quire.layers.norm import Norm, head_norms, norm_of
from quire.layers.qk_norm import NormedHeads, clipped
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models.decoder import LayerFactory, decoder_of
from quire.quant.sharding import of_heads

_PARTS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Attention block of a decoder layer: QKV projection, paged attention, output projection."""

    num_inputs = 1
    """Number of concatenated hidden vectors that the QKV projection reads per token."""
    Product: type[QKVLinear] = QKVLinear

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        names = scope.names
        self.qkv = self.Product(
            self.num_inputs * facts.hidden,
            facts.heads,
            facts.kv_heads,
            facts.head_dim,
            scope / "qkv_proj",
            bias=facts.qkv_bias,
            names=(names.qkv,) if facts.fused_qkv else _PARTS[: 2 if layer.keys_are_values else 3],
            paired_dim=rope.paired_dim,
            by_head=names.qkv_by_head,
        )
        norms: list[Norm] = []
        by_layer = facts.qk_norm == "each" or (facts.qk_norm == "head" and facts.norm == "layer")
        if by_layer:
            self.qkv.transform_qkv = NormedHeads(names.qk_norms, self.qkv, facts, rope.paired_dim, scope)
        elif facts.qk_norm:
            for name, heads in zip(names.qk_norms, (facts.heads, facts.kv_heads), strict=True):
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
            chunked=layer.chunked,
        )
        self.norms = nn.ModuleList(norms)
        self.mix = PagedAttention(spec, rope, scope, facts.alibi_slopes)
        (self.qkv if facts.qk_norm == "all" else self.mix).norms = head_norms(norms)
        if facts.qkv_clip is not None:
            self.qkv.transform_qkv = clipped(facts.qkv_clip)
        self.out = RowLinear(
            facts.heads * facts.head_dim, facts.hidden, scope / names.out, bias=facts.out_bias
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(self.mix(x, self.qkv, batch), batch)


class Layer(nn.Module):
    """Pre-norm layer: attention, then MLP or experts, each with a residual."""

    Mixer: LayerFactory = Attention

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.ops = scope.ops
        self.scale = facts.residual_scale
        self.attention_norm = norm_of(facts, scope / scope.names.norms[0])
        self.attention = self.mixer(facts, layer, rope, scope)
        self.mlp_norm = norm_of(facts, scope / scope.names.norms[-1])
        self.mlp = self.feed_forward(facts, layer, scope)

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        """Build the attention or SSM mixer of the layer. `scope` is that of the layer."""
        return self.Mixer(facts, layer, rope, scope / scope.names.attention)

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        """Build the MoE block or the MLP of the layer. `scope` is that of the layer."""
        names = scope.names
        return MoE(facts, scope) if layer.moe else MLP(facts, scope / names.mlp, names=names.mlp_names)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self._scaled(self.attention(x, batch)), residual)
        return self._scaled(self.mlp(x, batch)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else self.ops.scale(x, self.scale)


class PlainLayer(Layer):
    """Llama layer with an MLP without gate."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PlainMLP(facts, scope / scope.names.mlp, names=scope.names.mlp_names)


def layer_with(mixer: LayerFactory, layer: type[Layer] = Layer) -> type[Layer]:
    """Return a subclass of `layer` with `mixer` as its attention."""
    return type(layer.__name__, (layer,), {"Mixer": mixer})


Llama = decoder_of(Layer)
