"""GPT-2 and its like: a plain feed-forward half, mostly layer norms with biases and learned positions.

What differs is in their facts, and in what their checkpoints call things.
"""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP, PlainMLP
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder, MakesLayer


class NemotronLayer(llama.Layer):
    """Llama's, with a plain feed-forward half."""

    mlp_names = ("mlp.up_proj", "mlp.down_proj")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PlainMLP(facts, scope, names=self.mlp_names)


class Nemotron(Decoder):
    """The model."""

    Layer = NemotronLayer


class Starcoder2Layer(NemotronLayer):
    """The same under other names."""

    mlp_names = ("mlp.c_fc", "mlp.c_proj")


class Starcoder2(Decoder):
    """The model."""

    Layer = Starcoder2Layer


class GPT2Attention(llama.Attention):
    """Llama's under other names."""

    fused_name = "c_attn"
    out_name = "c_proj"


class GPT2Layer(Starcoder2Layer):
    """The same under other names."""

    Mixer: MakesLayer = GPT2Attention
    attention_name = "attn"
    norm_names = ("ln_1", "ln_2")


class GPT2(Decoder):
    """The model."""

    Layer: MakesLayer = GPT2Layer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"
    places = "wpe"


class BigCodeAttention(GPT2Attention):
    """The same, head by head."""

    by_head = True


class BigCodeLayer(GPT2Layer):
    """The same."""

    Mixer: MakesLayer = BigCodeAttention


class BigCode(GPT2):
    """StarCoder, the first."""

    Layer = BigCodeLayer


class JaisLayer(GPT2Layer):
    """GPT-2's with a gate."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / "mlp", names=("c_fc2", "c_fc", "c_proj"))


class Jais(GPT2):
    """The first one."""

    Layer = JaisLayer


class OPTAttention(llama.Attention):
    """Llama's under another name."""

    out_name = "out_proj"


class OPTLayer(NemotronLayer):
    """The same under other names."""

    Mixer: MakesLayer = OPTAttention
    norm_names = ("self_attn_layer_norm", "final_layer_norm")
    mlp_names = ("fc1", "fc2")


class OPT(Decoder):
    """The model."""

    Layer = OPTLayer
    body, last = "model.decoder", "final_layer_norm"
    first_place = 2
