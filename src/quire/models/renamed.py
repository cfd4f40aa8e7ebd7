"""Llama under other names: Baichuan, InternLM 2, EXAONE 3, ChatGLM, Qwen 1, Ling."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder


class BaichuanAttention(llama.Attention):
    """Llama's under another name."""

    fused_name = "W_pack"


class BaichuanLayer(llama.Layer):
    """The same."""

    Mixer = BaichuanAttention


class Baichuan(Decoder):
    """The model."""

    Layer = BaichuanLayer


class NamedLayer(llama.Layer):
    """Whose feed-forward half has names of its own."""

    mlp_name = "mlp"
    mlp_names: tuple[str, ...] = ()
    """Of gate, up and down, or of the first two as one."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / self.mlp_name, names=self.mlp_names)


class InternLM2Attention(llama.Attention):
    """Llama's under other names, head by head."""

    fused_name, out_name = "wqkv", "wo"
    by_head = True


class InternLM2Layer(NamedLayer):
    """The same."""

    Mixer = InternLM2Attention
    attention_name, norm_names = "attention", ("attention_norm", "ffn_norm")
    mlp_name, mlp_names = "feed_forward", ("w1", "w3", "w2")


class InternLM2(Decoder):
    """The model."""

    Layer = InternLM2Layer
    embedding, head_name = "tok_embeddings", "output"


class ExaoneAttention(llama.Attention):
    """Llama's under another name."""

    out_name = "out_proj"


class ExaoneLayer(NamedLayer):
    """The same."""

    Mixer = ExaoneAttention
    attention_name, norm_names = "attn.attention", ("ln_1", "ln_2")
    mlp_names = ("c_fc_0", "c_fc_1", "c_proj")


class Exaone(Decoder):
    """The model."""

    Layer = ExaoneLayer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"


class ChatGLMAttention(llama.Attention):
    """Llama's under other names."""

    fused_name, out_name = "query_key_value", "dense"
    norm_names = ("query_layernorm", "key_layernorm")


class ChatGLMLayer(NamedLayer):
    """The same."""

    Mixer = ChatGLMAttention
    attention_name = "self_attention"
    mlp_names = ("dense_h_to_4h", "dense_4h_to_h")


class ChatGLM(Decoder):
    """The model."""

    Layer = ChatGLMLayer
    body, embedding, stack = "transformer", "embedding.word_embeddings", "encoder.layers"
    last, head_name = "encoder.final_layernorm", "transformer.output_layer"


class QwenAttention(llama.Attention):
    """Llama's under other names."""

    fused_name, out_name = "c_attn", "c_proj"


class QwenLayer(NamedLayer):
    """The same."""

    Mixer = QwenAttention
    attention_name, norm_names = "attn", ("ln_1", "ln_2")
    mlp_names = ("w2", "w1", "c_proj")


class Qwen(Decoder):
    """The first Qwen."""

    Layer = QwenLayer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"


class BailingLayer(llama.Layer):
    """Llama's, with experts."""

    Mixer = ChatGLMAttention
    attention_name = "attention"


class Bailing(Decoder):
    """Ling and Ring."""

    Layer = BailingLayer
    embedding = "word_embeddings"
