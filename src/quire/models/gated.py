"""Decoders with gates, sinks or routers of their own: Laguna, Flint, Kolibri 1, Beam."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.expert_router import ExpertRouter
from quire.layers.linear import ColumnLinear
from quire.layers.moe import ChoiceBias, MoE
from quire.layers.rope import Rope
from quire.layers.scope import LoadedModule, Scope, Target
from quire.models import llama, llama4
from quire.models.decoder import LayerFactory, decoder_of
from quire.models.gemma import GemmaModel, SandwichLayer
from quire.quant.sharding import divided
from quire.quant.weight import frozen_parameter


class SoftplusGate(llama.Attention):
    """Llama attention with the softplus of a gate on its output, one value per head or per element."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.ops, self.width = scope.ops, facts.head_dim if facts.head_gate else 1
        size = facts.heads * facts.head_dim // self.width
        self.gate = ColumnLinear(facts.hidden, size, scope / "g_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate = F.softplus(self.gate(x, batch).float()).view(-1, 1)
        mixed = self.mix(x, self.qkv, batch)
        self.ops.scale_rows(mixed.view(-1, self.width), gate.to(mixed.dtype))
        return self.out(mixed, batch)


Laguna = decoder_of(llama.layer_with(SoftplusGate))


class OffsetAttention(llama.Attention):
    """Llama attention with attention sinks that are named `softmax_offset` in checkpoints."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.mix.sinks_name = f"{scope.name}.softmax_offset"


Flint = decoder_of(llama.layer_with(OffsetAttention))


class LogitRouter(ExpertRouter):
    """Router that adds the bias for the choice of experts to the logits, not to their sigmoid."""

    def choose(self, x: Tensor, bias: Tensor | None, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        logits = self.multiply(x.float(), batch)
        ids = torch.topk(logits if bias is None else logits + bias, self.routing.per_token).indices
        weights = logits.gather(1, ids).sigmoid()
        if self.routing.renormalized:
            weights = weights / weights.sum(1, keepdim=True)
        return ids.to(torch.int32), weights


class KolibriMixture(MoE):
    """MoE block with `LogitRouter`. `scope` is that of the layer."""

    Chooser = LogitRouter

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.moe is not None
        bias = scope / "moe.router.expert_bias"
        self.choice = ChoiceBias(facts.moe.experts, bias, in_row=False)


class KolibriLayer(SandwichLayer):
    """Attention, then experts, each with a norm before and after and a residual."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return KolibriMixture(facts, scope)


Kolibri = decoder_of(KolibriLayer, after_norms=("post_attn_norm", "post_ffn_norm"))


class HeadBias(LoadedModule):
    """A bias for each head, added to all elements of the head."""

    def __init__(self, heads: int, head_dim: int, scope: Scope) -> None:
        super().__init__()
        self.name, self.head_dim = scope.name, head_dim
        self.shard = divided(scope.group, heads)
        self.bias = frozen_parameter(scope.empty(self.shard.size))

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.bias, 0, (self.shard,))

    def forward(self, x: Tensor) -> Tensor:
        x.view(len(x), -1, self.head_dim).add_(self.bias[:, None])
        return x


class BeamAttention(llama4.Attention):
    """Llama attention with an elementwise output gate; without RoPE, queries are scaled by position."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        if layer.rope is None:
            positions = torch.arange(1, scope.max_len + 1, device=scope.device)
            self.query_scales = torch.exp(0.1 * torch.log1p(positions / 2048))[:, None]
        self.gate = ColumnLinear(facts.hidden, facts.heads * facts.head_dim, scope / "gate_proj")
        self.bias = HeadBias(facts.heads, facts.head_dim, scope / "gate_bias")

    def attend(self, x: Tensor, batch: Batch) -> Tensor:
        gate: Tensor = self.bias(self.gate(x, batch))
        return self.ops.weigh(super().attend(x, batch), gate)


class BeamLayer(SandwichLayer):
    """Attention, then MLP or experts, each with a norm before and after. Residuals and outputs are scaled."""

    Mixer: LayerFactory = BeamAttention

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.scales = layer.residual_scales

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        kept_mixer, mixer, kept_mlp, mlp = self.scales
        x, residual = self.attention_norm(x, residual)
        mixed = self.ops.scale(self.attended_norm.normalize(self.attention(x, batch)), mixer)
        x, residual = self.mlp_norm(mixed, self.ops.scale(residual, kept_mixer))
        fed = self.ops.scale(self.fed_norm.normalize(self.mlp(x, batch)), mlp)
        return fed, self.ops.scale(residual, kept_mlp)


Beam = decoder_of(BeamLayer, GemmaModel)
