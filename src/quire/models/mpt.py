"""MPT and DBRX, under names of their own."""

from quire.models import llama
from quire.models.decoder import Decoder, MakesLayer
from quire.models.gpt2 import NemotronLayer


class Attention(llama.Attention):
    """Llama's under other names."""

    fused_name, out_name = "Wqkv", "out_proj"


class MPTLayer(NemotronLayer):
    """The same with a plain feed-forward half."""

    Mixer = Attention
    attention_name, norm_names = "attn", ("norm_1", "norm_2")
    mlp_names = ("ffn.up_proj", "ffn.down_proj")


class MPT(Decoder):
    """The model."""

    Layer: MakesLayer = MPTLayer
    body, embedding, stack, last = "transformer", "wte", "blocks", "norm_f"


class DBRXLayer(llama.Layer):
    """Llama's with experts."""

    Mixer = Attention
    attention_name = "norm_attn_norm.attn"
    norm_names = ("norm_attn_norm.norm_1", "norm_attn_norm.norm_2")


class DBRX(MPT):
    """The model."""

    Layer = DBRXLayer
