"""Phi 1 and 2, GPT-J: attention and a plain feed-forward half side by side behind one norm."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import PlainMLP
from quire.layers.scope import Scope
from quire.models import cohere, llama
from quire.models.decoder import Decoder, MakesLayer


class Attention(llama.Attention):
    """Llama's under another name."""

    out_name = "dense"
    norm_names = ("q_layernorm", "k_layernorm")


class Layer(cohere.Layer):
    """The same with a plain feed-forward half."""

    Mixer: MakesLayer = Attention
    mlp_names = ("mlp.fc1", "mlp.fc2")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PlainMLP(facts, scope, names=self.mlp_names)


class Phi(Decoder):
    """The model."""

    Layer = Layer
    last = "final_layernorm"


class GPTJAttention(llama.Attention):
    """Llama's under another name."""

    out_name = "out_proj"


class GPTJLayer(Layer):
    """Phi's under other names."""

    Mixer = GPTJAttention
    attention_name, norm_name = "attn", "ln_1"
    mlp_names = ("mlp.fc_in", "mlp.fc_out")


class GPTJ(Decoder):
    """The model."""

    Layer = GPTJLayer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"
