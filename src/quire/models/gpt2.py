"""GPT-2 and similar models: a plain MLP, mostly layer norms with biases and learned positions.

The models differ in their facts and in their checkpoint names.
"""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.scope import DecoderNames, Scope
from quire.models.decoder import Decoder, LayerFactory
from quire.models.llama import PlainLayer


class Nemotron(Decoder):
    """Nemotron decoder (also Arcee and Jais 2)."""

    Layer: LayerFactory = PlainLayer
    names = DecoderNames(mlp_names=("up_proj", "down_proj"))


class Starcoder2(Nemotron):
    """StarCoder 2 decoder."""

    names = DecoderNames(mlp_names=("c_fc", "c_proj"))


class GPT2(Nemotron):
    """GPT-2 decoder."""

    names = DecoderNames(
        body="transformer",
        embedding="wte",
        positions="wpe",
        layers="h",
        last_norm="ln_f",
        norms=("ln_1", "ln_2"),
        attention="attn",
        qkv="c_attn",
        out="c_proj",
        mlp_names=("c_fc", "c_proj"),
    )


class BigCode(GPT2):
    """GPT-BigCode decoder (StarCoder 1): GPT-2 with a fused QKV that is grouped by key head."""

    names = GPT2.names._replace(qkv_by_head=True)


class JaisLayer(PlainLayer):
    """GPT-2 layer with a gated MLP."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / "mlp", names=("c_fc2", "c_fc", "c_proj"))


class Jais(GPT2):
    """Jais 1 decoder."""

    Layer = JaisLayer


class OPT(Nemotron):
    """OPT decoder."""

    names = DecoderNames(
        body="model.decoder",
        last_norm="final_layer_norm",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        out="out_proj",
        mlp="",
        mlp_names=("fc1", "fc2"),
    )
    first_position = 2


class MPT(Nemotron):
    """MPT decoder."""

    names = DecoderNames(
        body="transformer",
        embedding="wte",
        layers="blocks",
        last_norm="norm_f",
        norms=("norm_1", "norm_2"),
        attention="attn",
        qkv="Wqkv",
        out="out_proj",
        mlp="ffn",
        mlp_names=("up_proj", "down_proj"),
    )
