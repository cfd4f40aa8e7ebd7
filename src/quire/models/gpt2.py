"""GPT-2 and similar models: a plain MLP, mostly layer norms with biases and learned positions.

The models differ in their hyperparameters and in their checkpoint names.
"""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.scope import DecoderNames, Scope
from quire.models.decoder import Decoder, decoder_of
from quire.models.llama import PlainLayer

Nemotron = decoder_of(PlainLayer, mlp_names=("up_proj", "down_proj"))
"""Nemotron decoder (also Arcee and Jais 2)."""
Starcoder2 = decoder_of(PlainLayer, mlp_names=("c_fc", "c_proj"))
GPT2 = decoder_of(
    PlainLayer,
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
BigCode = decoder_of(PlainLayer, GPT2, qkv_by_head=True)
"""GPT-BigCode decoder (StarCoder 1): GPT-2 with a fused QKV that is grouped by key head."""


class JaisLayer(PlainLayer):
    """GPT-2 layer with a gated MLP."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / "mlp", names=("c_fc2", "c_fc", "c_proj"))


Jais = decoder_of(JaisLayer, GPT2)


class OPT(Decoder):
    """OPT decoder."""

    Layer = PlainLayer
    names = DecoderNames(
        body="model.decoder",
        last_norm="final_layer_norm",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        out="out_proj",
        mlp="",
        mlp_names=("fc1", "fc2"),
    )
    first_position = 2


MPT = decoder_of(
    PlainLayer,
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
