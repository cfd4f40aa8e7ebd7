"""Decoders equal to another family under other key names: InternLM, EXAONE 3, ChatGLM, Qwen 1, Ling."""

import math
from dataclasses import replace

from quire.checkpoint.facts import ArchFacts, MoeFacts
from quire.checkpoint.families.alibi import slopes_of
from quire.checkpoint.families.decoder import LAYER_NORM, decoder
from quire.checkpoint.families.dense import llama, qwen2
from quire.checkpoint.families.moe import add_experts, deepseek_experts, first_dense, mtp_pattern
from quire.checkpoint.reader import ConfigReader

NORMED_VOCAB = 125696
"""Vocabulary size of Baichuan 2. It is how Baichuan 2 is recognized, since no key of config.json shows that
its output head has normalized rows."""


def internlm(keys: ConfigReader) -> ArchFacts:
    return decoder(keys, attention_bias=keys.flag("bias", True))


def internlm2(keys: ConfigReader) -> ArchFacts:
    return decoder(keys, fused_qkv=True, attention_bias=keys.flag("bias"))


def mimo(keys: ConfigReader) -> ArchFacts:
    """Read MiMo: Qwen 2 with MTP layers."""
    return replace(qwen2(keys.defaults(qkv_bias=keys.get("attention_bias"))), unused=r"\.mtp_layers\.")


def baichuan_7b(keys: ConfigReader) -> ArchFacts:
    return replace(llama(keys), fused_qkv=True, norm_head=keys.get("vocab_size") == NORMED_VOCAB)


def baichuan(keys: ConfigReader) -> ArchFacts:
    """Read Baichuan: 7B has rotary embedding, 13B has ALiBi slopes; only the hidden size distinguishes
    them."""
    facts = baichuan_7b(keys)
    if facts.hidden == 4096:
        return facts
    layers = tuple(replace(layer, rope=None) for layer in facts.layers)
    return replace(facts, layers=layers, alibi_slopes=slopes_of(facts.heads))


def exaone(keys: ConfigReader) -> ArchFacts:
    """Read EXAONE 3; EXAONE 4 is another family."""
    return decoder(
        keys.defaults(activation_function="silu", layer_norm_epsilon=1e-5).but(
            num_hidden_layers=keys.size("num_layers")
        ),
        activation_key="activation_function",
        eps_key="layer_norm_epsilon",
    )


def chatglm(keys: ConfigReader) -> ArchFacts:
    """Read ChatGLM 2 and 3, and the first GLM-4 checkpoints: half of each head is rotated, in adjacent
    pairs."""
    for key, value in {"rmsnorm": True, "post_layer_norm": True, "add_bias_linear": False}.items():
        keys.require(key, value)
    keys.require("apply_residual_connection_post_layernorm", False)
    heads = keys.size("num_attention_heads")
    shared = keys.size("multi_query_group_num", 1) if keys.flag("multi_query_attention") else heads
    return decoder(
        keys.defaults(layernorm_epsilon=1e-5).but(
            vocab_size=keys.size("padded_vocab_size", keys.get("vocab_size")),
            num_hidden_layers=keys.size("num_layers"),
            num_key_value_heads=shared,
            head_dim=keys.size("kv_channels", keys.size("hidden_size") // heads),
            partial_rotary_factor=0.5,
            rope_theta=10000.0 * keys.number("rope_ratio", 1.0),
        ),
        pairs=True,
        eps_key="layernorm_epsilon",
        intermediate=keys.size("ffn_hidden_size"),
        fused_qkv=True,
        qkv_bias=keys.flag("add_qkv_bias"),
        unused=r"rotary_pos_emb\.inv_freq$",
    )


def qwen(keys: ConfigReader) -> ArchFacts:
    """Read Qwen 1. Its dynamic NTK scaling beyond the trained length is not supported."""
    keys.require("no_bias", True)
    return decoder(
        keys.defaults(layer_norm_epsilon=1e-6).but(
            num_key_value_heads=None,
            head_dim=keys.get("kv_channels"),
            rope_theta=keys.number("rotary_emb_base", 10000.0),
            partial_rotary_factor=keys.number("rotary_pct", 1.0),
            max_position_embeddings=keys.size("seq_length", keys.get("max_position_embeddings")),
        ),
        eps_key="layer_norm_epsilon",
        intermediate=keys.size("intermediate_size") // 2,
        fused_qkv=True,
        qkv_bias=True,
    )


def orion(keys: ConfigReader) -> ArchFacts:
    return decoder(keys.defaults(rms_norm_eps=1e-5), **LAYER_NORM)


def minicpm(keys: ConfigReader) -> ArchFacts:
    """Read MiniCPM: Llama with factors on embeddings, residuals and logits."""
    keys.require("num_experts", 0)
    depth, layers = keys.number("scale_depth", 1.0), keys.size("num_hidden_layers")
    return decoder(
        keys.defaults(tie_word_embeddings=True),
        embed_scale=keys.number("scale_emb", 1.0),
        residual_scale=depth / math.sqrt(layers),
        logit_scale=keys.number("dim_model_base", 1.0) / keys.size("hidden_size"),
    )


def deepseek(keys: ConfigReader) -> ArchFacts:
    """Read DeepSeek 1: Llama's attention, softmax over all experts."""
    keys.require("moe_layer_freq", 1)
    moe = deepseek_experts(keys.but(topk_method="greedy", routed_scaling_factor=None), "softmax")
    return add_experts(llama(keys), moe, first_dense(keys))


def bailing(keys: ConfigReader) -> ArchFacts:
    """Read Ling and Ring."""
    keys = keys.defaults(norm_topk_prob=True).but(topk_method="greedy")
    return _bailing(keys, deepseek_experts(keys, "softmax"))


def bailing_v2(keys: ConfigReader) -> ArchFacts:
    """Read Ling and Ring 2: DeepSeek-V3's experts, and partial rotary embedding."""
    keys.require("score_function", "sigmoid")
    facts = _bailing(keys, replace(deepseek_experts(keys, "sigmoid"), names="bailing"))
    return replace(facts, unused=mtp_pattern(keys))


def _bailing(keys: ConfigReader, moe: MoeFacts) -> ArchFacts:
    shared = keys.count("num_shared_experts")
    inner = keys.size("moe_shared_expert_intermediate_size", moe.intermediate)
    if keys.get("rotary_dim") is not None:
        rotary_factor = keys.size("rotary_dim") / keys.size("head_dim")
        keys = keys.defaults(partial_rotary_factor=rotary_factor)
    facts = decoder(
        keys,
        fused_qkv=True,
        qkv_bias=keys.flag("use_qkv_bias"),
        out_bias=keys.flag("use_bias"),
        qk_norm="head" if keys.flag("use_qk_norm") else "",
        norm_head=keys.flag("norm_head"),
    )
    return add_experts(facts, replace(moe, shared_intermediate=inner * shared), first_dense(keys))
