"""Llama with other tensor names: Baichuan, InternLM 2, EXAONE 3, ChatGLM, Qwen 1, Ling, DBRX, VaultGemma."""

from quire.models.decoder import decoder_of
from quire.models.gpt2 import GPT2, MPT
from quire.models.llama import Layer

Baichuan = decoder_of(Layer, qkv="W_pack")
InternLM2 = decoder_of(
    Layer,
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
"""InternLM 2 decoder. The fused QKV is grouped by key head."""
Exaone = decoder_of(
    Layer, GPT2, attention="attn.attention", out="out_proj", mlp_names=("c_fc_0", "c_fc_1", "c_proj")
)
ChatGLM = decoder_of(
    Layer,
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
Qwen = decoder_of(Layer, GPT2, mlp_names=("w2", "w1", "c_proj"))
Bailing = decoder_of(
    Layer,
    embedding="word_embeddings",
    attention="attention",
    qkv="query_key_value",
    qk_norms=("query_layernorm", "key_layernorm"),
    out="dense",
)
"""Bailing decoder (Ling, Ring)."""
DBRX = decoder_of(
    Layer, MPT, norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"), attention="norm_attn_norm.attn"
)
VaultGemma = decoder_of(Layer, norms=("input_layernorm", "pre_feedforward_layernorm"))
