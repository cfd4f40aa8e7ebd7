"""Older dense decoders of the GPT kind: StableLM, OLMo, GPT-J, Falcon and others."""

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.families.alibi import slopes_of
from quire.checkpoint.families.decoder import LAYER_NORM, decoder
from quire.checkpoint.families.dense import gpt2, gpt_keys
from quire.checkpoint.reader import ConfigReader


def stablelm(keys: ConfigReader) -> ArchFacts:
    """Read StableLM. The norms of queries and keys have separate weights per head. Older files have other key
    names."""
    rotary_factor, eps = keys.optional_number("rope_pct"), keys.optional_number("norm_eps")
    return decoder(
        keys.defaults(partial_rotary_factor=rotary_factor or 0.25, layer_norm_eps=eps or 1e-5),
        eps_key="layer_norm_eps",
        **LAYER_NORM,
        qkv_bias=keys.flag("use_qkv_bias"),
        qk_norm="each" if keys.flag("qk_layernorm") else "",
        parallel_norms=int(keys.flag("use_parallel_residual")),
    )


def olmo(keys: ConfigReader) -> ArchFacts:
    """Read OLMo 1, whose norms have no weights."""
    biased, clip = keys.flag("attention_bias"), keys.optional_number("clip_qkv")
    return decoder(keys, attention_bias=biased, norm="layer_bare", norm_eps=1e-5, qkv_clip=clip)


def gptj(keys: ConfigReader) -> ArchFacts:
    """Read GPT-J: a part of each head is rotated, in adjacent pairs."""
    rotary_factor = keys.size("rotary_dim", 64) / (keys.size("n_embd") // keys.size("n_head"))
    keys = gpt_keys(keys).but(partial_rotary_factor=rotary_factor)
    return decoder(
        keys, pairs=True, activation_key="activation_function", mlp_bias=True, head_bias=True, **LAYER_NORM
    )


def gpt_bigcode(keys: ConfigReader) -> ArchFacts:
    """Read GPTBigCode, mostly with multi-query attention."""
    multi_query = keys.flag("multi_query", True)
    keys = keys.defaults(activation_function="gelu_pytorch_tanh")
    return gpt2(keys, transposed=False, kv_heads=1 if multi_query else keys.size("n_head"))


def persimmon(keys: ConfigReader) -> ArchFacts:
    return decoder(
        keys.defaults(
            rope_theta=25000.0, partial_rotary_factor=0.5, hidden_act="relu2", layer_norm_eps=1e-5
        ).but(num_key_value_heads=None, head_dim=None),
        eps_key="layer_norm_eps",
        fused_qkv=True,
        qk_norm="head" if keys.flag("qk_layernorm", True) else "",
        biases=True,
        **LAYER_NORM,
    )


def falcon(keys: ConfigReader) -> ArchFacts:
    """Read Falcon: sequential attention and feed-forward, or parallel ones after one or two norms."""
    heads, is_new = keys.size("num_attention_heads"), keys.flag("new_decoder_architecture")
    kv_heads = keys.size("num_kv_heads", heads)
    if not is_new:
        kv_heads = 1 if keys.flag("multi_query", True) else heads
    norms = keys.size("num_ln_in_parallel_attn", 2) if is_new else int(keys.flag("parallel_attn", True))
    if norms > 2:
        raise keys.wrong("num_ln_in_parallel_attn", "1 or 2")
    hidden, uses_alibi = keys.size("hidden_size"), keys.flag("alibi")
    scale = (hidden // heads) ** -0.5  # also applies to the slopes
    return decoder(
        keys.defaults(activation="gelu", layer_norm_epsilon=1e-5, tie_word_embeddings=True).but(
            num_key_value_heads=kv_heads, head_dim=None
        ),
        activation_key="activation",
        eps_key="layer_norm_epsilon",
        intermediate=keys.size("ffn_hidden_size", 4 * hidden),
        fused_qkv=True,
        parallel_norms=norms,
        alibi_slopes=tuple(slope * scale for slope in slopes_of(heads)) if uses_alibi else (),
        rotates=[not uses_alibi] * keys.size("num_hidden_layers"),
        biases=keys.flag("bias"),
        **LAYER_NORM,
    )
