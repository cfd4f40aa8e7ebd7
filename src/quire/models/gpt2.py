"""GPT-2 and similar models: a plain MLP, mostly layer norms with biases and learned positions.

The models differ in their facts and in their checkpoint names.
"""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP, PlainMLP
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory


class NemotronLayer(llama.Layer):
    """Llama layer with a plain MLP."""

    mlp_names = ("mlp.up_proj", "mlp.down_proj")

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return PlainMLP(facts, scope, names=self.mlp_names)


class Nemotron(Decoder):
    """Nemotron decoder (also Arcee and Jais 2)."""

    Layer = NemotronLayer


class Starcoder2Layer(NemotronLayer):
    """Nemotron layer with StarCoder 2's names."""

    mlp_names = ("mlp.c_fc", "mlp.c_proj")


class Starcoder2(Decoder):
    """StarCoder 2 decoder."""

    Layer = Starcoder2Layer


class GPT2Attention(llama.Attention):
    """Llama attention with GPT-2's names."""

    fused_name = "c_attn"
    out_name = "c_proj"


class GPT2Layer(Starcoder2Layer):
    """Nemotron layer with GPT-2's names."""

    Mixer: LayerFactory = GPT2Attention
    attention_name = "attn"
    norm_names = ("ln_1", "ln_2")


class GPT2(Decoder):
    """GPT-2 decoder."""

    Layer: LayerFactory = GPT2Layer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"
    places = "wpe"


class BigCodeAttention(GPT2Attention):
    """GPT-2 attention with a fused QKV that is grouped by key head."""

    by_head = True


class BigCodeLayer(GPT2Layer):
    """GPT-2 layer with BigCode attention."""

    Mixer: LayerFactory = BigCodeAttention


class BigCode(GPT2):
    """GPT-BigCode decoder (StarCoder 1)."""

    Layer = BigCodeLayer


class JaisLayer(GPT2Layer):
    """GPT-2 layer with a gated MLP."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / "mlp", names=("c_fc2", "c_fc", "c_proj"))


class Jais(GPT2):
    """Jais 1 decoder."""

    Layer = JaisLayer


class OPTAttention(llama.Attention):
    """Llama attention with OPT's names."""

    out_name = "out_proj"


class OPTLayer(NemotronLayer):
    """Nemotron layer with OPT's names."""

    Mixer: LayerFactory = OPTAttention
    norm_names = ("self_attn_layer_norm", "final_layer_norm")
    mlp_names = ("fc1", "fc2")


class OPT(Decoder):
    """OPT decoder."""

    Layer = OPTLayer
    body, last = "model.decoder", "final_layer_norm"
    first_place = 2
