"""Llama with other checkpoint names: Baichuan, InternLM 2, EXAONE 3, ChatGLM, Qwen 1, Ling, DBRX,
VaultGemma."""

from quire.layers.scope import DecoderNames
from quire.models.gpt2 import GPT2, MPT
from quire.models.llama import Llama


class Baichuan(Llama):
    """Baichuan decoder."""

    names = DecoderNames(qkv="W_pack")


class InternLM2(Llama):
    """InternLM 2 decoder. The fused QKV is grouped by key head."""

    names = DecoderNames(
        embedding="tok_embeddings",
        head="output",
        norms=("attention_norm", "ffn_norm"),
        attention="attention",
        qkv="wqkv",
        qkv_by_head=True,
        out="wo",
        mlp="feed_forward",
        mlp_names=("w1", "w3", "w2"),
    )


class Exaone(Llama):
    """EXAONE 3 decoder."""

    names = GPT2.names._replace(
        attention="attn.attention", out="out_proj", mlp_names=("c_fc_0", "c_fc_1", "c_proj")
    )


class ChatGLM(Llama):
    """ChatGLM decoder."""

    names = DecoderNames(
        body="transformer",
        embedding="embedding.word_embeddings",
        layers="encoder.layers",
        last_norm="encoder.final_layernorm",
        head="transformer.output_layer",
        attention="self_attention",
        qkv="query_key_value",
        qk_norms=("query_layernorm", "key_layernorm"),
        out="dense",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
    )


class Qwen(Llama):
    """Qwen 1 decoder."""

    names = GPT2.names._replace(mlp_names=("w2", "w1", "c_proj"))


class Bailing(Llama):
    """Bailing decoder (Ling, Ring)."""

    names = DecoderNames(
        embedding="word_embeddings",
        attention="attention",
        qkv="query_key_value",
        qk_norms=("query_layernorm", "key_layernorm"),
        out="dense",
    )


class DBRX(Llama):
    """DBRX decoder."""

    names = MPT.names._replace(
        norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"), attention="norm_attn_norm.attn"
    )


class VaultGemma(Llama):
    """VaultGemma decoder."""

    names = DecoderNames(norms=("input_layernorm", "pre_feedforward_layernorm"))
