"""MPT and DBRX: Llama layers with other checkpoint names."""

from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory
from quire.models.gpt2 import NemotronLayer


class Attention(llama.Attention):
    """Llama attention with MPT's names."""

    fused_name, out_name = "Wqkv", "out_proj"


class MPTLayer(NemotronLayer):
    """Llama layer with a plain MLP and MPT's names."""

    Mixer = Attention
    attention_name, norm_names = "attn", ("norm_1", "norm_2")
    mlp_names = ("ffn.up_proj", "ffn.down_proj")


class MPT(Decoder):
    """MPT decoder."""

    Layer: LayerFactory = MPTLayer
    body, embedding, stack, last = "transformer", "wte", "blocks", "norm_f"


class DBRXLayer(llama.Layer):
    """Llama layer with experts and DBRX's names."""

    Mixer = Attention
    attention_name = "norm_attn_norm.attn"
    norm_names = ("norm_attn_norm.norm_1", "norm_attn_norm.norm_2")


class DBRX(MPT):
    """DBRX decoder."""

    Layer = DBRXLayer
