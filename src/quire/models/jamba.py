"""Jamba: Mamba layers, a few attention layers, and experts in every other layer."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import mixer_of
from quire.models import llama
from quire.models.decoder import Decoder


class Layer(llama.Layer):
    """Pre-norm layer: Mamba or attention, then MLP or experts, each with a residual."""

    norm_names = ("input_layernorm", "pre_ff_layernorm")

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "attention":
            return super().mixer(facts, layer, rope, scope)
        return mixer_of(facts, layer, scope / "mamba")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MoE(facts, scope) if layer.moe else MLP(facts, scope / "feed_forward")


class Jamba(Decoder):
    """Jamba decoder."""

    Layer = Layer
    last = "final_layernorm"
