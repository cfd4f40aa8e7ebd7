"""Gemma 4: another head size in full-attention layers, and experts in parallel to the MLP.

Small models have per-layer token inputs, and last layers that share the KV cache of earlier layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.errors import ConfigError
from quire.layers.expert_router import ExpertRouter
from quire.layers.mlp import MLP
from quire.layers.moe import Experts
from quire.layers.norm import RMSNorm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope, Target
from quire.layers.vision import Learned
from quire.models.decoder import Decoder, HiddenWithAux, refuse_pipeline
from quire.models.gemma3n import Attention, KVSharingAttention, PerLayerGate, PerLayerInputs, share_kv_caches


class LayerScale(Learned):
    """Learned factor of a layer's outputs."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope, 1, dtype=torch.float32)
        self.ops, self.factor = scope.ops, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale x in place."""
        return x if self.factor == 1 else self.ops.scale(x, self.factor)

    def finish(self) -> None:
        self.factor = self.vectors.item()


class RouterNorm(RMSNorm):
    """Norm of the router's input, divided by the square root of the hidden size."""

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight)

    def finish(self) -> None:
        self.weight.mul_(self.run.size**-0.5)


class Gemma4Mixture(nn.Module):
    """MoE block with a factor per expert. `scope` is that of the layer."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        moe, router = facts.moe, scope / "router"
        assert moe is not None
        self.router_norm = RouterNorm(facts.hidden, facts.norm_eps, router / "scale")
        self.router = ExpertRouter(facts.hidden, moe, router / "proj")
        self.factors = Learned(router / "per_expert_scale", moe.experts, dtype=torch.float32)
        self.before = norm_of(facts, scope / "pre_feedforward_layernorm_2")
        self.experts = Experts(moe, facts.hidden, facts.activation, scope)
        self.after = norm_of(facts, scope / "post_feedforward_layernorm_2")
        self.sum = scope.group.all_reduce

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        ids, weights = self.router(self.router_norm.normalize(x), None, batch)
        weights = weights * self.factors.vectors[ids.long()]
        out: Tensor = self.experts(self.before.normalize(x), ids, weights, batch)
        return self.after.normalize(self.sum(out))


class Layer(nn.Module):
    """Attention, then MLP and optional experts, each with a norm before and after; then the per-layer input
    of the token. The outputs are scaled by a learned factor."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        attention: type[nn.Module] = Attention if layer.kv_sharing_target is None else KVSharingAttention
        self.ops = scope.ops
        self.before_attention = norm_of(facts, scope / "input_layernorm")
        self.attention = attention(facts, layer, rope, scope / "self_attn")
        self.after_attention = norm_of(facts, scope / "post_attention_layernorm")
        self.before_mlp = norm_of(facts, scope / "pre_feedforward_layernorm")
        self.mlp = MLP(facts, scope / "mlp")
        self.mixture = self.after_dense = None
        if layer.moe:
            self.after_dense = norm_of(facts, scope / "post_feedforward_layernorm_1")
            self.mixture = Gemma4Mixture(facts, scope)
        self.after_mlp = norm_of(facts, scope / "post_feedforward_layernorm")
        self.own = None if facts.altup is None else PerLayerGate(facts, facts.altup, scope)
        self.scale = LayerScale(scope / "layer_scalar")

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, layer_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), [T, hidden] each, whose sum is the output of the layer; `layer_input` is [T,
        per_layer] if the model has per-layer inputs, else None."""
        x, residual = self.before_attention(x, residual)
        x = self.after_attention.normalize(self.attention(x, batch))
        x, residual = self.before_mlp(x, residual)
        x = self.mlp(x, batch)
        if self.mixture is not None and self.after_dense is not None:
            x = self.ops.add(self.after_dense.normalize(x), self.mixture(residual, batch))
        x = self.after_mlp.normalize(x)
        if self.own is not None:
            residual = self.ops.add(residual, x)
            x = self.own(residual, layer_input, batch)
        return self.scale(x), self.scale(residual)


class Gemma4(Decoder):
    """Gemma 4 decoder."""

    Layer = Layer

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        is_linked = facts.altup is not None or any(
            layer.kv_sharing_target is not None for layer in facts.layers
        )
        if is_linked:
            refuse_pipeline(scope, "a Gemma 4 where layers share the KV cache of others")
        super().__init__(facts, scope)
        body = scope / self.names.body
        self.own = None if facts.altup is None else PerLayerInputs(facts, facts.altup, body)
        self.media_id = None if facts.altup is None else facts.altup.media_id
        if is_linked:
            share_kv_caches(facts, [layer.attention for layer in self.layers if isinstance(layer, Layer)])

    def forward(self, batch: Batch) -> Tensor | HiddenWithAux | tuple[Tensor, Tensor]:
        if self.own is None:
            return super().forward(batch)
        x, residual = self.embedded(batch)
        token_ids = batch.token_ids
        if batch.embeds is not None and self.media_id is not None:
            token_ids = token_ids.index_fill(0, batch.embeds[0], self.media_id)
        layer_inputs = self.own(x, token_ids, batch)
        for number, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch, layer_inputs[:, number])
        assert self.norm is not None
        return self.norm(x, residual)[0]

    def set_aux_hidden_state_layers(
        self, layers: tuple[int, ...], max_tokens: int, device: torch.device
    ) -> None:
        if self.own is not None:
            raise ConfigError("draft heads are not supported with a Gemma 4 that has per-layer inputs")
        super().set_aux_hidden_state_layers(layers, max_tokens, device)
