"""Granite 4 and Bamba: Mamba-2 layers and a few attention layers, each with an MLP, some with experts."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import Mamba2Mixer
from quire.models import llama
from quire.models.decoder import Decoder


class Layer(llama.Layer):
    """Pre-norm layer: Mamba-2 or attention, then MLP or experts, each with a residual."""

    def mixer(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        if layer.mixer == "attention":
            return super().mixer(facts, layer, rope, scope)
        assert facts.state is not None
        return Mamba2Mixer(facts.hidden, facts.state, facts.norm_eps, scope / "mamba")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        if layer.moe:
            return MoE(facts, scope)
        return MLP(facts, scope / "shared_mlp", names=("input_linear", "output_linear"))


class GraniteHybrid(Decoder):
    """Granite 4 decoder."""

    Layer = Layer


class BambaLayer(Layer):
    """Granite 4 layer with Bamba's names."""

    norm_names = ("input_layernorm", "pre_ff_layernorm")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / "feed_forward")


class Bamba(Decoder):
    """Bamba decoder."""

    Layer = BambaLayer
    last = "final_layernorm"
