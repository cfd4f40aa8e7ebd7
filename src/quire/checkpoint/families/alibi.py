"""Decoders whose heads lose sight of what is far behind (ALiBi): Bloom, MPT, Jais."""

from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.families.decoder import decoder
from quire.checkpoint.families.dense import gpt2, only, with_defaults
from quire.checkpoint.reader import ConfigReader


def slopes_of(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """2 ** -(most / n), its square and so on up to the nth, for n heads that are a power of 2. Of other
    numbers, those of the next power: every second one first, then those between."""
    power = 1 << (heads - 1).bit_length()
    alibi_slopes = [2 ** -(most * (head + 1) / power) for head in range(power)]
    return tuple(alibi_slopes if power == heads else (alibi_slopes[1::2] + alibi_slopes[::2])[:heads])


def bloom(keys: ConfigReader) -> ArchFacts:
    """GPT-NeoX's layers one after the other, behind a norm of the embedding."""
    only(keys, "apply_residual_connection_post_layernorm", False)
    heads = keys.size("n_head" if keys.get("n_head") is not None else "num_attention_heads")
    hidden = keys.size("hidden_size" if keys.get("hidden_size") is not None else "n_embed")
    return _leaning(
        with_defaults(keys, num_hidden_layers=keys.get("n_layer"), layer_norm_epsilon=1e-5).but(
            hidden_size=hidden, num_attention_heads=heads, hidden_act="gelu_pytorch_tanh"
        ),
        intermediate=keys.size("n_inner", 4 * hidden),
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def mpt(keys: ConfigReader) -> ArchFacts:
    """No biases at all. Files that were made for MPT's own code call its sizes as others do not."""
    block = keys.get("attn_config") or {}
    attention = ConfigReader(f"{keys.source}, attn_config", block)
    for key, value in {"alibi": True, "qk_ln": False, "attn_type": "multihead_attention"}.items():
        only(attention, key, value)
    only(attention, "prefix_lm", False)
    only(keys, "no_bias", True)
    only(keys, "logit_scale", None)
    facts = databricks(keys)
    return _leaning(
        facts.but(hidden_act="gelu"),
        most=attention.number("alibi_bias_max", 8.0),
        intermediate=keys.size("expansion_ratio", 4) * facts.size("hidden_size"),
        qkv_clip=attention.optional_number("clip_qkv"),
        attention_scale=attention.optional_number("softmax_scale"),
    )


def jais(keys: ConfigReader) -> ArchFacts:
    """GPT-2 with a gate, and factors on embeddings, scores and logits."""
    for key, value in {"position_embedding_type": "alibi", "activation_function": "swiglu"}.items():
        only(keys.but(**{key: keys.get(key) or "none"}), key, value)
    only(keys, "alibi_scaling", None)
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
    """The sizes of MPT and DBRX under the names that others have for them."""
    names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    sizes = {name: keys.size(own) for name, own in names.items()}
    sizes["max_position_embeddings"] = keys.size("max_seq_len", 2048)
    return with_defaults(keys, layer_norm_epsilon=1e-5).but(**sizes)


def _leaning(keys: ConfigReader, most: float = 8.0, **facts: Any) -> ArchFacts:
    return decoder(
        keys.but(num_key_value_heads=None, head_dim=None),
        turning=[False] * keys.size("num_hidden_layers"),
        alibi_slopes=slopes_of(keys.size("num_attention_heads"), most),
        eps_key="layer_norm_epsilon",
        norm="layer",
        fused_qkv=True,
        tied=keys.flag("tie_word_embeddings", True),
        **facts,
    )
