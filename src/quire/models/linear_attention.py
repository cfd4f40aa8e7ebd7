"""Decoders with linear attention in most layers: OLMo Hybrid, Kimi Linear, Ling 3, MiniMax-Text-01 and M1."""

from dataclasses import replace

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.linear import HeadGate
from quire.layers.linear_attention import DeltaAttention, LightningAttention
from quire.layers.lora_layers import alias_targets
from quire.layers.mlp import MLP
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import deepseek, llama
from quire.models.decoder import LayerFactory, decoder_of
from quire.models.post_norm import PostNormLayer


def delta_of(facts: ArchFacts, scope: Scope) -> DeltaAttention:
    assert facts.state is not None
    return DeltaAttention(facts.hidden, facts.state, facts.norm_eps, scope, out=scope.names.out)


class OlmoDeltaLayer(llama.Layer):
    """Pre-norm layer: gated delta rule, then MLP, each with a residual."""

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return delta_of(facts, scope / "linear_attn")


def _stored_norm(scope: Scope, *names: str) -> str:
    """Return the first of `names` that is a norm of this layer in the checkpoint; names[0] if none is."""
    return next((name for name in names if scope.is_stored(f"{scope.name}.{name}.weight")), names[0])


def olmo_hybrid_layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
    """Build a layer of OLMo Hybrid: attention with norms after it, or the delta rule with norms before it.
    Checkpoints that transformers wrote have other names of these norms."""
    if layer.mixer == "attention":
        first = _stored_norm(scope, "post_attention_layernorm", "feedforward_layer_norm")
        names = scope.names._replace(norms=(first, "post_feedforward_layernorm"))
        return PostNormLayer(facts, layer, rope, replace(scope, names=names))
    first = _stored_norm(scope, "attention_layer_norm", "input_layernorm")
    second = _stored_norm(scope, "feedforward_layer_norm", "post_attention_layernorm")
    return OlmoDeltaLayer(
        facts, layer, rope, replace(scope, names=scope.names._replace(norms=(first, second)))
    )


OlmoHybrid = decoder_of(olmo_hybrid_layer)


class KimiLinearLayer(deepseek.Layer):
    """Pre-norm layer: KDA or latent attention, then MLP or experts, each with a residual."""

    aliases: tuple[tuple[str, str], ...] = ((".f_", ".forget_gate.f_"), (".block_sparse_moe.", ".mlp."))
    """Parts of layer names in the checkpoint, and their counterparts in transformers, which adapters use."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        for name, alias in self.aliases:
            alias_targets(self, name, alias)

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "latent":
            return super().mixer(facts, layer, rope, scope)
        return delta_of(facts, scope / scope.names.attention)

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        wrapped = scope / "block_sparse_moe"  # name of dense parts in checkpoints that transformers wrote
        if not layer.moe and scope.is_stored(f"{wrapped.name}.gate_proj.weight"):
            return MLP(facts, wrapped)
        return super().feed_forward(facts, layer, scope)


KimiLinear = decoder_of(KimiLinearLayer)


class GatedLatentAttention(deepseek.Attention):
    """Latent attention with a scalar gate on the output of each head."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.gate = HeadGate(facts.hidden, facts.heads, scope / "g_proj")

    def attend(self, x: Tensor, batch: Batch, selected: deepseek.SelectedTokens) -> Tensor:
        return self.gate.scale(super().attend(x, batch, selected), x, batch)


class Ling3Layer(KimiLinearLayer):
    """Kimi Linear layer with gated heads in latent attention."""

    Mixer: LayerFactory = GatedLatentAttention
    aliases = ((".f_", ".forget_gate.f_"), (".attention.", ".self_attn."), (".dense", ".o_proj"))


Ling3 = decoder_of(Ling3Layer, embedding="word_embeddings", attention="attention", out="dense")
"""Ling 3 decoder (BailingHybrid)."""


class MiniMaxLayer(llama.Layer):
    """Lightning or softmax attention, then experts. Residuals are normed inputs; both addends are scaled."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.scales = layer.residual_scales

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "attention":
            return super().mixer(facts, layer, rope, scope)
        assert facts.state is not None
        scope, activation = scope / scope.names.attention, facts.activation
        return LightningAttention(facts.hidden, facts.state, scope, depth=layer.depth, activation=activation)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        kept_mixer, mixer, kept_mlp, mlp = self.scales
        x, _ = self.attention_norm(x, residual)
        mixed = self.ops.scale(self.attention(x, batch), mixer)
        x, _ = self.mlp_norm(mixed, self.ops.scale(x, kept_mixer))
        fed = self.ops.scale(self.mlp(x, batch), mlp)
        return fed, self.ops.scale(x, kept_mlp)


MiniMax = decoder_of(MiniMaxLayer)
