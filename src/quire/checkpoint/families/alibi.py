"""Decoders with ALiBi slopes: Bloom, MPT, Jais."""

from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.families.decoder import decoder
from quire.checkpoint.families.dense import gpt2
from quire.checkpoint.reader import ConfigReader


def slopes_of(heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Return the ALiBi slope of each head. If the number of heads is a power of 2, the slope of head i is 2
    ** -(max_bias * (i + 1) / heads). Otherwise the slopes are taken from those of the next power of 2, in the
    order 1, 3, 5 ..., 0, 2, 4 ..."""
    power = 1 << (heads - 1).bit_length()
    alibi_slopes = [2 ** -(max_bias * (head + 1) / power) for head in range(power)]
    return tuple(alibi_slopes if power == heads else (alibi_slopes[1::2] + alibi_slopes[::2])[:heads])


def bloom(keys: ConfigReader) -> ArchFacts:
    """Read Bloom: GPT-NeoX with sequential layers and a norm after the embedding."""
    keys.require("apply_residual_connection_post_layernorm", False)
    heads = keys.size("n_head" if keys.get("n_head") is not None else "num_attention_heads")
    hidden = keys.size("hidden_size" if keys.get("hidden_size") is not None else "n_embed")
    return _alibi_decoder(
        keys.defaults(num_hidden_layers=keys.get("n_layer"), layer_norm_epsilon=1e-5).but(
            hidden_size=hidden, num_attention_heads=heads, hidden_act="gelu_pytorch_tanh"
        ),
        intermediate=keys.size("n_inner", 4 * hidden),
        norm_bias=True,
        biases=True,
    )


def mpt(keys: ConfigReader) -> ArchFacts:
    """Read MPT, which has no biases. Checkpoints for MPT's remote code have other key names."""
    block = keys.get("attn_config") or {}
    attention = ConfigReader(f"{keys.source}, attn_config", block)
    for key, value in {"alibi": True, "qk_ln": False, "attn_type": "multihead_attention"}.items():
        attention.require(key, value)
    attention.require("prefix_lm", False)
    keys.require("no_bias", True)
    keys.require("logit_scale", None)
    facts = databricks(keys)
    return _alibi_decoder(
        facts.but(hidden_act="gelu"),
        max_bias=attention.number("alibi_bias_max", 8.0),
        intermediate=keys.size("expansion_ratio", 4) * facts.size("hidden_size"),
        qkv_clip=attention.optional_number("clip_qkv"),
        attention_scale=attention.optional_number("softmax_scale"),
    )


def jais(keys: ConfigReader) -> ArchFacts:
    """Read Jais: GPT-2 with a gated feed-forward part, and factors on embeddings, attention scores and
    logits."""
    for key, value in {"position_embedding_type": "alibi", "activation_function": "swiglu"}.items():
        keys.but(**{key: keys.get(key) or "none"}).require(key, value)
    keys.require("alibi_scaling", None)
    embed, logits = keys.optional_number("mup_embeddings_scale"), keys.optional_number("mup_output_alpha")
    facts = gpt2(keys.but(activation_function="silu"), learned_positions=False)
    head_dim = facts.head_dim
    return replace(
        facts,
        alibi_slopes=slopes_of(facts.heads),
        attention_scale=1 / head_dim if keys.flag("mup_scale_qk_dot_by_d") else None,
        embed_scale=embed or keys.number("embeddings_scale", 1.0),
        logit_scale=(logits or 1.0) * keys.number("mup_width_scale", 1.0),
        unused=r"\.attn\.(masked_)?bias$|relative_pe",
    )


def databricks(keys: ConfigReader) -> ConfigReader:
    """Return the keys of MPT or DBRX, with the sizes also under Llama's key names."""
    names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    sizes = {name: keys.size(key) for name, key in names.items()}
    sizes["max_position_embeddings"] = keys.size("max_seq_len", 2048)
    return keys.defaults(layer_norm_epsilon=1e-5).but(**sizes)


def _alibi_decoder(keys: ConfigReader, max_bias: float = 8.0, **facts: Any) -> ArchFacts:
    return decoder(
        keys.but(num_key_value_heads=None, head_dim=None),
        rotates=[False] * keys.size("num_hidden_layers"),
        alibi_slopes=slopes_of(keys.size("num_attention_heads"), max_bias),
        eps_key="layer_norm_epsilon",
        norm="layer",
        fused_qkv=True,
        tied=keys.flag("tie_word_embeddings", True),
        **facts,
    )
