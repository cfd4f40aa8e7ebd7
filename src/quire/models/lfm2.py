"""LFM2: gated short-convolution layers, a few attention layers, and experts in some models."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import mixer_of
from quire.models import llama
from quire.models.decoder import Decoder


class Attention(llama.Attention):
    """Llama attention with LFM2's names."""

    out_name, norm_names = "out_proj", ("q_layernorm", "k_layernorm")


class Layer(llama.Layer):
    """Pre-norm layer: short convolution or attention, then MLP or experts, each with a residual."""

    Mixer = Attention
    norm_names = ("operator_norm", "ffn_norm")

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "attention":
            return super().mixer(facts, layer, rope, scope)
        return mixer_of(facts, layer, scope / "conv")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        if layer.moe:
            return MoE(facts, scope)
        return MLP(facts, scope / "feed_forward", names=("w1", "w3", "w2"))


class Lfm2(Decoder):
    """LFM2 decoder."""

    Layer = Layer
    last = "embedding_norm"
