"""Llama, and the families that are Llama with other facts: Mistral, Qwen2, Qwen3, SmolLM."""

from functools import cache

from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.config.facts import ArchFacts, LayerFacts
from quire.layers.attention import PagedAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import GateUpLinear, QKVLinear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.layers.scope import Scope


class Attention(nn.Module):
    """Queries, keys and values, the mix of what was seen, and the way back."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.qkv = QKVLinear(
            facts.hidden, facts.heads, facts.kv_heads, facts.head_dim, scope / "qkv_proj", bias=facts.qkv_bias
        )
        q_norm, k_norm = (
            RMSNorm(facts.head_dim, facts.norm_eps, scope / name) if facts.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        spec = AttentionSpec(self.qkv.heads, self.qkv.kv_heads, facts.head_dim, scope.dtype, layer.window)
        self.mix = PagedAttention(spec, rope, scope / "attn", q_norm=q_norm, k_norm=k_norm)
        self.out = RowLinear(
            facts.heads * facts.head_dim, facts.hidden, scope / "o_proj", bias=facts.out_bias
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.out(self.mix(x, self.qkv, batch))
        return out


class MLP(nn.Module):
    """The gated feed-forward half of a layer."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        self.gate_up = GateUpLinear(
            facts.hidden, facts.intermediate, scope / "gate_up_proj", bias=facts.mlp_bias
        )
        self.down = RowLinear(facts.intermediate, facts.hidden, scope / "down_proj", bias=facts.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate_up(x))
        return out


class Layer(nn.Module):
    """Attention, then feed-forward, each behind a norm and beside a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(facts.hidden, facts.norm_eps, scope / "input_layernorm")
        self.attention = Attention(facts, layer, rope, scope / "self_attn")
        self.mlp_norm = RMSNorm(facts.hidden, facts.norm_eps, scope / "post_attention_layernorm")
        self.mlp = MLP(facts, scope / "mlp")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x, batch), residual)
        return self.mlp(x), residual


class Llama(nn.Module):
    """The model: embedding, layers, norm, head."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        body = scope / "model"
        self.embed = Embedding(facts.vocab, facts.hidden, body / "embed_tokens")
        rope = cache(lambda rope: Rope(rope, scope))  # a table for each kind of layer, not for each layer
        self.layers = nn.ModuleList(
            Layer(facts, layer, rope(layer.rope), body / "layers" / i) for i, layer in enumerate(facts.layers)
        )
        self.norm = RMSNorm(facts.hidden, facts.norm_eps, body / "norm")
        self.head = Head(
            facts.vocab, facts.hidden, scope / "lm_head", tied=self.embed if facts.tied else None
        )

    def forward(self, batch: Batch) -> Tensor:
        """[T, hidden], after the final norm."""
        x, residual = self.embed(batch.token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        out: Tensor = self.norm(x, residual)[0]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
        out: Tensor = self.head(hidden)
        return out
