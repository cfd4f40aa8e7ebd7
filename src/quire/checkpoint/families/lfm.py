"""Decoders with short convolutions in most layers: LFM2 and LFM3."""

from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, StateFacts
from quire.checkpoint.families.decoder import decoder, head_dim_of, layer_kinds, ropes_by_kind, sliding_window
from quire.checkpoint.families.moe import read_experts
from quire.checkpoint.families.ssm import build_layers, has_state
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope


def lfm2(keys: ConfigReader) -> ArchFacts:
    """Read LFM2: gated short convolutions, and attention in the layers of `full_attn_idxs`."""
    inner = keys.size("intermediate_size" if keys.get("block_ff_dim") is None else "block_ff_dim")
    if keys.flag("block_auto_adjust_ff_dim", True):
        inner, unit = 2 * inner // 3, keys.size("block_multiple_of", 256)
        inner = int(keys.number("block_ffn_dim_multiplier", 1.0) * inner)
        inner = -(-inner // unit) * unit
    return _lfm2(keys, [False] * keys.size("num_hidden_layers"), intermediate=inner)


def lfm2_moe(keys: ConfigReader) -> ArchFacts:
    """Read LFM2-MoE: LFM2 with experts in all but the first layers."""
    count, dense = keys.size("num_hidden_layers"), keys.count("num_dense_layers", 2)
    moe = read_experts(
        keys.defaults(num_experts=32, num_experts_per_tok=4),
        "moe_intermediate_size",
        keys.flag("norm_topk_prob", True),
        scoring="sigmoid",
        scale=keys.number("routed_scaling_factor", 1.0),
        choice_bias=keys.flag("use_expert_bias", True),
        names="lfm2",
    )
    return _lfm2(keys, [i >= dense for i in range(count)], moe=moe)


def _lfm2(keys: ConfigReader, sparse: list[bool], **facts: Any) -> ArchFacts:
    attending = keys.get("full_attn_idxs")
    keys = keys.defaults(norm_eps=1e-5, rope_theta=1e6)
    tied = "tie_embedding" if keys.get("tie_embedding") is not None else "tie_word_embeddings"
    if keys.get("layer_types") is None:
        attending = range(len(sparse)) if attending is None else keys.integers("full_attn_idxs")
        kinds = ["full_attention" if i in attending else "conv" for i in range(len(sparse))]
        keys = keys.but(layer_types=kinds)
    rope = read_rope(keys, head_dim_of(keys))
    return decoder(
        keys,
        layers=build_layers(has_state(keys, "layer_types"), sparse, "conv", rope),
        eps_key="norm_eps",
        qk_norm="head",
        tied=keys.flag(tied, True),
        state=conv_state(keys.size("hidden_size"), keys.size("conv_L_cache", 3), keys.flag("conv_bias")),
        **facts,
    )


def lfm3(keys: ConfigReader) -> ArchFacts:
    """Read LFM3: LFM2 with longer convolutions, windows, gated heads and norms after each part."""
    keys.require("use_sandwich_norm", True)
    count = keys.size("num_hidden_layers")
    kinds = "full_attention", "sliding_attention"
    default = [kinds[0] if i % 4 == 2 else kinds[1] if i and i % 4 == 0 else "conv" for i in range(count)]
    if keys.get("rope_parameters") is None:
        full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        keys = keys.but(rope_parameters={kinds[0]: full, kinds[1]: {"rope_theta": 1e4}})
    ropes, window = ropes_by_kind(keys, keys.size("head_dim", 128), *kinds), sliding_window(keys, 256)
    layers = {kind: LayerFacts(ropes[kind], window if kind == kinds[1] else None) for kind in kinds}
    layers["conv"] = LayerFacts(None, mixer="conv")
    return decoder(
        keys.defaults(norm_eps=1e-5, tie_word_embeddings=True),
        head_dim=128,
        layers=tuple(layers[kind] for kind in layer_kinds(keys, *layers, default=default)),
        eps_key="norm_eps",
        qk_norm="head",
        attention_bias=keys.flag("attention_bias"),
        head_gate=keys.flag("use_attention_gate", True),
        state=conv_state(keys.size("hidden_size"), keys.size("conv_L_cache", 7), keys.flag("conv_bias")),
    )


def conv_state(hidden: int, kernel: int, bias: bool) -> StateFacts:
    """Return the sizes of a short convolution over all channels of the hidden state."""
    return StateFacts(hidden, head_dim=1, state=0, groups=0, conv=kernel, conv_bias=bias, proj_bias=bias)
