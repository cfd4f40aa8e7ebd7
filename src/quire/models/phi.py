"""Phi 1 and 2: attention and a plain feed-forward half side by side behind one norm."""

from torch import nn

from quire.config.facts import ArchFacts, LayerFacts
from quire.layers.mlp import PlainMLP
from quire.layers.scope import Scope
from quire.models import cohere, llama
from quire.models.decoder import Decoder


class Attention(llama.Attention):
    """Llama's under another name."""

    out_name = "dense"


class Layer(cohere.Layer):
    """The same with a plain feed-forward half."""

    Mixer = Attention

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PlainMLP(facts, scope, names=("mlp.fc1", "mlp.fc2"))


class Phi(Decoder):
    """The model."""

    Layer = Layer
    last = "final_layernorm"
