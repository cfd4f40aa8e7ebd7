"""Qwen3-Next and Qwen3.5: gated delta rule layers, with gated attention in every fourth layer."""

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.reference.ssm import choose
from quire.layers.attention import PagedAttention
from quire.layers.linear import RowLinear
from quire.layers.norm import head_norms, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import GatedDelta, OrderedLinear, ungrouped_order
from quire.models import llama
from quire.models.decoder import LayerFactory, decoder_of
from quire.quant.sharding import divided, of_heads


class GatedAttention(nn.Module):
    """Fused gate and QKV projection, paged attention, sigmoid gate, output projection."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.ops, self.gates = scope.ops, choose(scope.device, scope.dtype)
        group, heads, head_dim = scope.group, scope.group.share(facts.heads), facts.head_dim
        both, keys = divided(group, 2 * facts.heads * head_dim), of_heads(group, facts.kv_heads, head_dim)
        inner = heads * head_dim
        queries, gates = ungrouped_order(heads, inner, inner).chunk(2)
        unchanged = ungrouped_order(1, keys.size)
        self.split = (inner, inner + 2 * keys.size)
        self.gate_qkv = OrderedLinear(
            facts.hidden,
            {"q_proj": (both,), "k_proj": (keys,), "v_proj": (keys,)},
            scope,
            # Gates first, so that queries, keys and values are contiguous.
            orders=[torch.cat((gates, queries)), unchanged, unchanged],
            bias=facts.qkv_bias,
        )
        norms = [norm_of(facts, scope / name, facts.head_dim) for name in ("q_norm", "k_norm")]
        self.norms = nn.ModuleList(norms)
        spec = AttentionSpec(heads, keys.size // head_dim, head_dim, scope.dtype, layer.window)
        self.mix = PagedAttention(spec, rope, scope)
        self.mix.norms = head_norms(norms)
        self.out = RowLinear(facts.heads * head_dim, facts.hidden, scope / "o_proj", bias=facts.out_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate, qkv = self.gate_qkv(x, batch).split(self.split, 1)
        mixed = self.mix.attend(qkv, batch)
        return self.out(self.gates.gate(mixed, gate, "sigmoid"), batch)


class Layer(llama.Layer):
    """Pre-norm layer: gated delta rule or gated attention, then MLP or experts, each with a residual."""

    Mixer: LayerFactory = GatedAttention
    grouped = True
    """Whether the checkpoint groups the projections of the gated delta rule by key head."""

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "attention":
            return super().mixer(facts, layer, rope, scope)
        assert facts.state is not None
        return GatedDelta(
            facts.hidden, facts.state, facts.norm_eps, scope / "linear_attn", grouped=self.grouped
        )


class Layer35(Layer):
    """Qwen3-Next layer with separate projections of QKV, gates, b and a."""

    grouped = False


Qwen3Next = decoder_of(Layer)
Qwen35 = decoder_of(Layer35)
