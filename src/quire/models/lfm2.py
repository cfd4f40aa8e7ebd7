"""LFM2: layers of a short convolution between two gates, a few that attend; experts in some models."""

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
    """The same under other names."""

    out_name, norm_names = "out_proj", ("q_layernorm", "k_layernorm")


class Layer(llama.Layer):
    """A convolution or attention, then feed-forward, each behind a norm and beside a residual."""

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
    """The model."""

    Layer = Layer
    last = "embedding_norm"
