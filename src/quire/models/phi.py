"""Phi 1 and 2, GPT-J: attention and a plain MLP in parallel after one norm."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import PlainMLP
from quire.layers.scope import Scope
from quire.models import cohere, llama
from quire.models.decoder import Decoder, LayerFactory


class Attention(llama.Attention):
    """Llama attention with Phi's names."""

    out_name = "dense"
    norm_names = ("q_layernorm", "k_layernorm")


class Layer(cohere.Layer):
    """Parallel layer with a plain MLP."""

    Mixer: LayerFactory = Attention
    mlp_names = ("mlp.fc1", "mlp.fc2")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PlainMLP(facts, scope, names=self.mlp_names)


class Phi(Decoder):
    """Phi 1 and 2 decoder."""

    Layer = Layer
    last = "final_layernorm"


class GPTJAttention(llama.Attention):
    """Llama attention with GPT-J's names."""

    out_name = "out_proj"


class GPTJLayer(Layer):
    """Phi layer with GPT-J's names."""

    Mixer = GPTJAttention
    attention_name, norm_name = "attn", "ln_1"
    mlp_names = ("mlp.fc_in", "mlp.fc_out")


class GPTJ(Decoder):
    """GPT-J decoder."""

    Layer = GPTJLayer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"
