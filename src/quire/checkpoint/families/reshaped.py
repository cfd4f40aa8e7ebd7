"""Llama with other layers: TeleChat 2, TeleFLM, PLaMo 3, Nemotron of variable layers, Ouro."""

from dataclasses import replace

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.checkpoint.families.decoder import (
    FULL,
    SLIDING,
    decoder,
    full_every,
    head_dim_of,
    layer_kinds,
    sliding_window,
)
from quire.checkpoint.families.dense import llama
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope


def telechat2(keys: ConfigReader) -> ArchFacts:
    """Read TeleChat 2, which has biases only after attention and after the feed-forward part."""
    keys = keys.renamed(
        {
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
            "seq_length": "max_position_embeddings",
        }
    )
    return decoder(keys.defaults(rms_norm_eps=1e-5), out_bias=True, mlp_bias=True)


def teleflm(keys: ConfigReader) -> ArchFacts:
    """Read TeleFLM: Llama with factors on embeddings and logits."""
    facts = llama(keys)
    if not keys.flag("use_mup"):
        return facts
    scale = keys.number("output_mult", 1.0) / keys.number("mup_scale_factor", 1.0)
    return replace(facts, embed_scale=keys.number("input_mult", 1.0), logit_scale=scale)


def plamo3(keys: ConfigReader) -> ArchFacts:
    """Read PLaMo 3: seven window layers per full-attention layer, with another rope base."""
    keys.require("scale_embedding", False)
    keys.require("linear_type", "normal")
    window = keys.get("sliding_window") or keys.get("window_size")
    if isinstance(window, list):
        window = next((size for size in window if size), None)
    keys = keys.but(sliding_window=window).defaults(tie_word_embeddings=True, rope_theta=1e6)
    default = full_every(keys, keys.size("sliding_window_pattern", 8))
    kinds, head_dim = layer_kinds(keys, FULL, SLIDING, default=default), keys.size("head_dim", 128)
    local = {"rope_type": "default", "rope_theta": keys.number("rope_local_theta", 10000.0)}
    ropes = {
        FULL: read_rope(keys, head_dim),
        SLIDING: read_rope(keys.but(rope_parameters=local, rope_scaling=None), head_dim),
    }
    windows = {FULL: None, SLIDING: sliding_window(keys, 2048)}
    return decoder(
        keys,
        head_dim=head_dim,
        layers=tuple(LayerFacts(ropes[kind], windows[kind]) for kind in kinds),
        norm="rms_plus_one",
        qk_norm="head",
        fused_qkv=True,
        fused_gate_up=True,
    )


def decilm(keys: ConfigReader) -> ArchFacts:
    """Read Llama-Nemotron (DeciLM): each layer has its own number of key/value heads and its own intermediate
    size, and may have no attention or no feed-forward part."""
    blocks, count, heads = (
        keys.get("block_configs"),
        keys.size("num_hidden_layers"),
        keys.size("num_attention_heads"),
    )
    if not isinstance(blocks, list) or len(blocks) != count:
        raise keys.wrong("block_configs", f"{count} objects")
    keys = keys.but(num_key_value_heads=None).defaults(intermediate_size=keys.size("hidden_size"))
    facts = llama(keys)
    layers = []
    for number, block in enumerate(blocks):
        parts = [block.get(name) if isinstance(block, dict) else None for name in ("attention", "ffn")]
        if not all(isinstance(part, dict) for part in parts):
            raise keys.wrong("block_configs", "objects with attention and ffn")
        attention, feed = (
            ConfigReader(f"{keys.source}, block_configs[{number}]", part or {}) for part in parts
        )
        attention.require("replace_with_linear", False)
        feed.require("replace_with_linear", False)
        attends, feeds = not attention.flag("no_op"), not feed.flag("no_op")
        layer = facts.layers[number]
        if attends:
            group = attention.size("n_heads_in_group", 1)
            if heads % group:
                raise attention.wrong("n_heads_in_group", f"a divisor of {heads}, the number of heads")
            layer = replace(layer, kv_heads=heads // group)
        if feeds:
            layer = replace(layer, intermediate=_read_intermediate(feed, facts.hidden))
        layers.append(replace(layer, mixer=layer.mixer if attends else "none", has_mlp=feeds))
    return replace(facts, layers=tuple(layers))


def _read_intermediate(feed: ConfigReader, hidden: int) -> int:
    if feed.get("ffn_mult") is None:
        return feed.size("intermediate_size")
    size = int(2 * feed.number("ffn_mult") * hidden / 3)
    return -(-size // 256) * 256


def ouro(keys: ConfigReader) -> ArchFacts:
    """Read Ouro, whose layers run several times, each time with a KV cache of their own."""
    keys.require("use_sliding_window", False)
    facts = decoder(keys.defaults(rope_theta=1e6), head_dim=head_dim_of(keys), unused=r"early_exit_gate\.")
    loops = keys.size("total_ut_steps", 4) - 1
    again = tuple(replace(layer, shared_block=number) for number, layer in enumerate(facts.layers))
    return replace(facts, layers=facts.layers + again * loops)
