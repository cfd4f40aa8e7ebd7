"""Llama with other checkpoint names: Baichuan, InternLM 2, EXAONE 3, ChatGLM, Qwen 1, Ling."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder


class BaichuanAttention(llama.Attention):
    """Llama attention with Baichuan's names."""

    fused_name = "W_pack"


class BaichuanLayer(llama.Layer):
    """Llama layer with Baichuan's names."""

    Mixer = BaichuanAttention


class Baichuan(Decoder):
    """Baichuan decoder."""

    Layer = BaichuanLayer


class NamedLayer(llama.Layer):
    """Llama layer with other names in its MLP."""

    mlp_name = "mlp"
    mlp_names: tuple[str, ...] = ()
    """Names of gate, up and down, or of a fused gate and up, and down."""

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return MLP(facts, scope / self.mlp_name, names=self.mlp_names)


class InternLM2Attention(llama.Attention):
    """Llama attention with InternLM 2's names; the fused QKV is grouped by key head."""

    fused_name, out_name = "wqkv", "wo"
    by_head = True


class InternLM2Layer(NamedLayer):
    """Llama layer with InternLM 2's names."""

    Mixer = InternLM2Attention
    attention_name, norm_names = "attention", ("attention_norm", "ffn_norm")
    mlp_name, mlp_names = "feed_forward", ("w1", "w3", "w2")


class InternLM2(Decoder):
    """InternLM 2 decoder."""

    Layer = InternLM2Layer
    embedding, head_name = "tok_embeddings", "output"


class ExaoneAttention(llama.Attention):
    """Llama attention with EXAONE's names."""

    out_name = "out_proj"


class ExaoneLayer(NamedLayer):
    """Llama layer with EXAONE's names."""

    Mixer = ExaoneAttention
    attention_name, norm_names = "attn.attention", ("ln_1", "ln_2")
    mlp_names = ("c_fc_0", "c_fc_1", "c_proj")


class Exaone(Decoder):
    """EXAONE 3 decoder."""

    Layer = ExaoneLayer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"


class ChatGLMAttention(llama.Attention):
    """Llama attention with ChatGLM's names."""

    fused_name, out_name = "query_key_value", "dense"
    norm_names = ("query_layernorm", "key_layernorm")


class ChatGLMLayer(NamedLayer):
    """Llama layer with ChatGLM's names."""

    Mixer = ChatGLMAttention
    attention_name = "self_attention"
    mlp_names = ("dense_h_to_4h", "dense_4h_to_h")


class ChatGLM(Decoder):
    """ChatGLM decoder."""

    Layer = ChatGLMLayer
    body, embedding, stack = "transformer", "embedding.word_embeddings", "encoder.layers"
    last, head_name = "encoder.final_layernorm", "transformer.output_layer"


class QwenAttention(llama.Attention):
    """Llama attention with Qwen 1's names."""

    fused_name, out_name = "c_attn", "c_proj"


class QwenLayer(NamedLayer):
    """Llama layer with Qwen 1's names."""

    Mixer = QwenAttention
    attention_name, norm_names = "attn", ("ln_1", "ln_2")
    mlp_names = ("w2", "w1", "c_proj")


class Qwen(Decoder):
    """Qwen 1 decoder."""

    Layer = QwenLayer
    body, embedding, stack, last = "transformer", "wte", "h", "ln_f"


class BailingLayer(llama.Layer):
    """Llama layer with Bailing's names; some layers have experts."""

    Mixer = ChatGLMAttention
    attention_name = "attention"


class Bailing(Decoder):
    """Bailing decoder (Ling, Ring)."""

    Layer = BailingLayer
    embedding = "word_embeddings"
