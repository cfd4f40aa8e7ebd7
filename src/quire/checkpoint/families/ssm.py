"""Decoders with recurrent state in all or most layers: Mamba, hybrid models, gated delta net."""

import math
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import (
    ArchFacts,
    LayerFacts,
    RopeFacts,
    SharedFacts,
    StateFacts,
)
from quire.checkpoint.families.decoder import decoder, full_every
from quire.checkpoint.families.dense import granite, llama
from quire.checkpoint.families.moe import (
    deepseek_experts,
    granite_experts,
    qwen_experts,
    qwen_sparse_layers,
    read_experts,
)
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope

_KINDS = {"linear_attention": True, "mamba": True, "conv": True, "full_attention": False, "attention": False}
"""Whether a layer has an SSM state, by its name in `layer_types`."""
_MAMBA_LAYER = LayerFacts(None, mixer="mamba", has_mlp=False)
_ATTENTION_LAYER = LayerFacts(None, has_mlp=False)
_MLP_LAYER, _MOE_LAYER = LayerFacts(None, mixer="none"), LayerFacts(None, mixer="none", moe=True)
_NEMOTRON_LAYERS = {
    "mamba": _MAMBA_LAYER,
    "linear_attention": _MAMBA_LAYER,
    "M": _MAMBA_LAYER,
    "attention": _ATTENTION_LAYER,
    "full_attention": _ATTENTION_LAYER,
    "*": _ATTENTION_LAYER,
    "mlp": _MLP_LAYER,
    "-": _MLP_LAYER,
    "moe": _MOE_LAYER,
    "E": _MOE_LAYER,
}
"""Layers by their names or letters in config.json of Nemotron-H."""


def mamba(keys: ConfigReader) -> ArchFacts:
    """Read Mamba: all layers are Mamba layers."""
    inner = keys.size("intermediate_size", keys.size("expand", 2) * keys.size("hidden_size"))
    return _mixer_only(keys.defaults(tie_word_embeddings=True), "selective", _read_mamba(keys, inner))


def falcon_mamba(keys: ConfigReader) -> ArchFacts:
    """Read FalconMamba: Mamba with norms of dt, B and C that have no weights."""
    facts, eps = mamba(keys), keys.number("mixer_rms_eps", 1e-6)
    assert facts.state is not None
    return replace(facts, state=replace(facts.state, norm="bare", norm_eps=eps))


def mamba2(keys: ConfigReader) -> ArchFacts:
    """Read Mamba-2: all layers are Mamba-2 layers."""
    keys = keys.defaults(num_heads=128, head_dim=64, n_groups=8, state_size=128)
    state = _read_mamba2(keys, keys.size("expand", 2) * keys.size("hidden_size"), _MAMBA2_KEYS)
    return _mixer_only(keys, "mamba", state)


def _mixer_only(keys: ConfigReader, mixer: str, state: StateFacts) -> ArchFacts:
    """Read a model whose layers are only a norm and `mixer`. Without attention, the number of heads is set to
    1."""
    keys.require("hidden_act", "silu")
    return decoder(
        keys.but(num_attention_heads=1, num_key_value_heads=1, head_dim=64),
        layers=(LayerFacts(None, mixer=mixer),) * keys.size("num_hidden_layers"),
        eps_key="layer_norm_epsilon" if keys.get("layer_norm_epsilon") is not None else "rms_norm_eps",
        intermediate=0,
        state=state,
    )


_MAMBA_KEYS = ("time_step_rank", "state_size", "conv_kernel", "use_conv_bias", "use_bias")
_JAMBA_KEYS = ("mamba_dt_rank", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")


def _read_mamba(keys: ConfigReader, inner: int, names: tuple[str, ...] = _MAMBA_KEYS) -> StateFacts:
    """Read the sizes of Mamba layers with `inner` channels; `names` are the keys of the other settings."""
    rank, size, conv, conv_bias, biased = names
    auto = math.ceil(keys.size("hidden_size") / 16)
    return StateFacts(
        heads=inner,
        head_dim=1,
        state=keys.size(size, 16),
        groups=0,
        conv=keys.size(conv, 4),
        conv_bias=keys.flag(conv_bias, True),
        proj_bias=keys.flag(biased),
        norm="none",
        rank=auto if keys.get(rank) in (None, "auto") else keys.size(rank),
    )


def jamba(keys: ConfigReader) -> ArchFacts:
    """Read Jamba: Mamba with norms, attention without rotary embedding in every n-th layer, and experts in
    some layers."""
    keys.require("hidden_act", "silu")
    every, first = keys.size("attn_layer_period", 8), keys.count("attn_layer_offset", 4)
    sparse_every, sparse_first = keys.size("expert_layer_period", 2), keys.count("expert_layer_offset", 1)
    numbers, moe = range(keys.size("num_hidden_layers")), None
    inner = keys.size("mamba_expand", 2) * keys.size("hidden_size")
    if keys.size("num_experts", 16) > 1:
        expert_keys = keys.defaults(num_experts=16, num_experts_per_tok=2)
        moe = read_experts(expert_keys, "intermediate_size", False, names="jamba")
    sparse = [moe is not None and i % sparse_every == sparse_first for i in numbers]
    return decoder(
        keys,
        layers=build_layers([i % every != first for i in numbers], sparse, "selective", None),
        moe=moe,
        state=replace(_read_mamba(keys, inner, _JAMBA_KEYS), norm="weighed"),
    )


def falcon_h1(keys: ConfigReader) -> ArchFacts:
    """Read Falcon-H1: attention and Mamba-2 in parallel in each layer, with scaling factors."""
    keys.require("hidden_act", "silu")
    facts = llama(keys.defaults(rms_norm_eps=1e-5))
    inner = keys.size("mamba_d_ssm", keys.size("mamba_expand", 2) * facts.hidden)
    state, into = _read_mamba2(keys, inner), keys.number("ssm_in_multiplier", 1.0)
    if keys.flag("projectors_bias") != state.proj_bias or (state.proj_bias and into != 1):
        raise keys.wrong("projectors_bias", "what mamba_proj_bias is, and with a bias ssm_in_multiplier 1")
    norm = "gate_last" if keys.flag("mamba_norm_before_gate", True) else "gate_first"
    scales = _read_factors(keys, "ssm_multipliers", 5)
    key_scale = keys.number("key_multiplier", 1.0)
    gate, down = _read_factors(keys, "mlp_multipliers", 2)
    rope = facts.layers[0].rope
    return replace(
        facts,
        layers=(LayerFacts(rope, mixer="attention+mamba"),) * len(facts.layers),
        attention_scale=None if key_scale == 1 else key_scale / math.sqrt(facts.head_dim),
        attention_scales=(
            keys.number("attention_in_multiplier", 1.0),
            keys.number("attention_out_multiplier", 1.0),
        ),
        mlp_scales=(gate, down),
        state_scale=keys.number("ssm_out_multiplier", 1.0),
        embed_scale=keys.number("embedding_multiplier", 1.0),
        logit_scale=keys.number("lm_head_multiplier", 1.0),
        state=replace(
            state,
            norm=norm if keys.flag("mamba_rms_norm") else "none",
            norm_groups=state.groups,
            scales=tuple(into * scale for scale in scales) if {into, *scales} != {1.0} else (),
        ),
    )


def _read_factors(keys: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Return a list of `count` factors; 1.0 each if the key is missing."""
    factors = keys.get(key)
    if factors is None:
        return (1.0,) * count
    is_list = isinstance(factors, list) and all(isinstance(factor, int | float) for factor in factors)
    if not is_list or len(factors) != count:
        raise keys.wrong(key, f"{count} numbers")
    return tuple(map(float, factors))


def zamba2(keys: ConfigReader) -> ArchFacts:
    """Read Zamba2: Mamba-2, and before some layers a shared block of attention and feed-forward."""
    keys.require("tie_word_embeddings", True)
    keys.require("use_long_context", False)
    hidden, heads = keys.size("hidden_size"), keys.size("n_mamba_heads", 8)
    head_dim = keys.size("attention_head_dim", 2 * hidden // keys.size("num_attention_heads"))
    rope = read_rope(keys.but(head_dim=head_dim), head_dim) if keys.flag("use_mem_rope") else None
    key = "layers_block_type" if keys.get("layers_block_type") is not None else "layer_types"
    kinds, num_blocks = keys.get(key), keys.size("num_mem_blocks", 1)
    if not isinstance(kinds, list) or any(kind not in ("hybrid", *_KINDS) for kind in kinds):
        raise keys.wrong(key, "for each layer mamba, linear_attention or hybrid")
    uses = [number for number, kind in enumerate(kinds) if kind == "hybrid"]
    shared_layers = {
        number: LayerFacts(
            rope, mixer="attention+mamba", shared_block=uses[use % num_blocks], shared_block_use=use
        )
        for use, number in enumerate(uses)
    }
    groups = keys.size("mamba_ngroups", 1)
    return decoder(
        keys.defaults(intermediate_size=4 * hidden, hidden_act="gelu", rms_norm_eps=1e-5).but(
            head_dim=head_dim, tie_word_embeddings=True
        ),
        layers=tuple(shared_layers.get(number, _MAMBA_LAYER) for number in range(len(kinds))),
        attention_scale=(head_dim / 2) ** -0.5,
        fused_gate_up=True,
        mlp_bias=keys.flag("add_bias_linear"),
        shared=SharedFacts(
            num_blocks, keys.size("adapter_rank", 128), keys.flag("use_shared_attention_adapter")
        ),
        state=StateFacts(
            heads=heads,
            head_dim=keys.size("mamba_expand", 2) * hidden // heads,
            state=keys.size("mamba_d_state", 64),
            groups=groups,
            conv=keys.size("mamba_d_conv", 4),
            proj_bias=keys.flag("add_bias_linear"),
            norm_groups=groups,
            norm_eps=1e-5,
            time_limits=_time_limits(keys, "time_step_min"),
        ),
    )


def granite_hybrid(keys: ConfigReader) -> ArchFacts:
    """Read Granite 4: Mamba-2, and attention that mostly has no rotary embedding."""
    keys.require("hidden_act", "silu")
    kinds = has_state(keys, "layers_block_type" if keys.get("layer_types") is None else "layer_types")
    facts, moe = granite(keys), None
    if keys.get("num_local_experts"):
        moe = granite_experts(keys)
    rope = facts.layers[0].rope if keys.get("position_embedding_type") == "rope" else None
    return replace(
        facts,
        layers=build_layers(kinds, [moe is not None] * len(kinds), "mamba", rope),
        intermediate=keys.size("shared_intermediate_size"),
        fused_gate_up=True,
        moe=moe,
        state=_read_mamba2(keys, keys.size("mamba_expand", 2) * facts.hidden),
    )


def bamba(keys: ConfigReader) -> ArchFacts:
    """Read Bamba: Mamba-2, and attention that rotates half of each head in `attn_layer_indices`."""
    keys.require("hidden_act", "silu")
    attention_layers, count = keys.integers("attn_layer_indices"), keys.size("num_hidden_layers")
    keys = keys.defaults(rms_norm_eps=1e-5).but(partial_rotary_factor=0.5)
    facts = llama(keys)
    has_state = [i not in attention_layers for i in range(count)]
    return replace(
        facts,
        layers=build_layers(has_state, [False] * count, "mamba", facts.layers[0].rope),
        state=_read_mamba2(keys, keys.size("mamba_expand", 2) * facts.hidden),
    )


_MAMBA2_KEYS = (
    *("num_heads", "head_dim", "n_groups", "state_size"),
    *("conv_kernel", "use_conv_bias", "use_bias"),
)
_HYBRID_KEYS = (
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    *("mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias"),
)


def _read_mamba2(keys: ConfigReader, inner: int, names: tuple[str, ...] = _HYBRID_KEYS) -> StateFacts:
    """Read the sizes of Mamba-2 layers with `inner` channels; `names` are the keys of the settings."""
    heads_key, dim_key, groups_key, state_key, conv_key, conv_bias, proj_bias = names
    heads, groups = keys.size(heads_key, 128), keys.size(groups_key, 1)
    head_dim = inner // heads if keys.get(dim_key) in (None, "auto") else keys.size(dim_key)
    if heads * head_dim != inner:
        raise keys.wrong(dim_key, f"{inner} / {heads_key}")
    return StateFacts(
        heads=heads,
        head_dim=head_dim,
        state=keys.size(state_key, 256),
        groups=groups,
        norm_groups=groups,
        conv=keys.size(conv_key, 4),
        conv_bias=keys.flag(conv_bias, True),
        proj_bias=keys.flag(proj_bias),
        time_limits=_time_limits(keys),
    )


def _time_limits(keys: ConfigReader, least: str = "") -> tuple[float, float]:
    """Return the smallest and largest time step. `least` is the key of another lower limit, which
    transformers applies as well; empty: there is none."""
    limits = keys.get("time_step_limit")
    limits = [0, math.inf] if limits is None else limits
    if isinstance(limits, list):  # transformers writes {"__float__": "Infinity"}
        limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    is_list = isinstance(limits, list) and all(isinstance(limit, int | float) for limit in limits)
    if not is_list or len(limits) != 2:
        raise keys.wrong("time_step_limit", "two numbers")
    low, high = map(float, limits)
    if least:
        minimum = keys.get(least)
        if minimum is not None and (not isinstance(minimum, int | float) or minimum < 0):
            raise keys.wrong(least, "a number that is not below 0")
        low = max(low, 1e-3 if minimum is None else float(minimum))
    return low, high


def nemotron_h(keys: ConfigReader) -> ArchFacts:
    """Read Nemotron-H. A layer is Mamba-2, attention without rotary embedding, experts or a plain
    feed-forward part."""
    keys.require("mamba_hidden_act", "silu")
    keys.require("mlp_hidden_act", "relu2")
    keys.require("sliding_window", None)
    layers = _read_nemotron_layers(keys)
    moe = None
    if any(layer.moe for layer in layers):
        moe = replace(
            deepseek_experts(keys, "sigmoid"),
            plain=True,
            latent=keys.count("moe_latent_size"),
            shared_intermediate=keys.size("moe_shared_expert_intermediate_size"),
            names="nemotron_h",
        )
    groups, biased = keys.size("n_groups", 8), keys.flag("attention_bias")
    return decoder(
        keys.defaults(layer_norm_epsilon=1e-5, mlp_hidden_act="relu2"),
        head_dim=128,
        layers=layers,
        activation_key="mlp_hidden_act",
        eps_key="layer_norm_epsilon",
        attention_bias=biased,
        mlp_bias=keys.flag("mlp_bias"),
        moe=moe,
        state=StateFacts(
            heads=keys.size("mamba_num_heads", 128),
            head_dim=keys.size("mamba_head_dim", 64),
            state=keys.size("ssm_state_size", 128),
            groups=groups,
            conv=keys.size("conv_kernel", 4),
            conv_bias=keys.flag("use_conv_bias", True),
            proj_bias=keys.flag("use_bias"),
            norm_groups=groups,
            time_limits=_time_limits(
                keys, "mamba_dt_min" if "mamba_dt_min" in keys.values else "time_step_min"
            ),
        ),
    )


def _read_nemotron_layers(keys: ConfigReader) -> tuple[LayerFacts, ...]:
    """Read the layers from a list of names, or from a string with one letter per layer."""
    known = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in known if keys.get(key) is not None), known[0])
    kinds = keys.get(key)
    if not isinstance(kinds, (list, str)) or any(kind not in _NEMOTRON_LAYERS for kind in kinds):
        raise keys.wrong(key, f"for each layer one of {', '.join(_NEMOTRON_LAYERS)}")
    return tuple(_NEMOTRON_LAYERS[kind] for kind in kinds)


def qwen3_next(keys: ConfigReader) -> ArchFacts:
    """Read Qwen3-Next: gated delta net, gated attention in every fourth layer, and experts in most layers."""
    sparse = qwen_sparse_layers(keys) if keys.get("num_experts") else set()
    moe = qwen_experts(keys, keys.flag("norm_topk_prob", True)) if keys.get("num_experts") else None
    return _gated_delta(keys, [i in sparse for i in range(keys.size("num_hidden_layers"))], moe=moe)


def qwen3_5(keys: ConfigReader) -> ArchFacts:
    """Read the dense Qwen3.5: Qwen3-Next without experts."""
    return _gated_delta(keys, [False] * keys.size("num_hidden_layers"))


def _gated_delta(keys: ConfigReader, sparse: list[bool], **facts: Any) -> ArchFacts:
    keys.require("hidden_act", "silu")
    if keys.get("partial_rotary_factor") is None:
        keys = keys.but(partial_rotary_factor=0.25)
    head_dim, biased = keys.size("head_dim", 256), keys.flag("attention_bias")
    rope = read_rope(keys, head_dim)
    default = full_every(keys, keys.size("full_attention_interval", 4), other="linear_attention")
    kinds = has_state(keys if keys.get("layer_types") else keys.but(layer_types=default), "layer_types")
    if all(sparse):
        facts["intermediate"] = keys.size("intermediate_size", keys.size("moe_intermediate_size"))
    return decoder(
        keys,
        head_dim=head_dim,
        layers=build_layers(kinds, sparse, "delta", rope),
        norm="rms_plus_one",
        qk_norm="head",
        output_gate=True,
        attention_bias=biased,
        state=StateFacts(
            heads=keys.size("linear_num_value_heads", 32),
            head_dim=keys.size("linear_value_head_dim", 128),
            state=keys.size("linear_key_head_dim", 128),
            groups=keys.size("linear_num_key_heads", 16),
            conv=keys.size("linear_conv_kernel_dim", 4),
            conv_bias=False,
        ),
        **facts,
    )


def build_layers(
    stateful: list[bool], sparse: list[bool], mixer: str, rope: RopeFacts | None
) -> tuple[LayerFacts, ...]:
    """Build the layers: `mixer` in those that are `stateful`, attention with `rope` in the others, experts in
    those that are `sparse`."""
    return tuple(
        LayerFacts(None, mixer=mixer, moe=moe) if has_state else LayerFacts(rope, moe=moe)
        for has_state, moe in zip(stateful, sparse, strict=True)
    )


def has_state(keys: ConfigReader, key: str) -> list[bool]:
    """Return for each layer whether it has an SSM state, by the layer types under `key`."""
    num_layers, kinds = keys.size("num_hidden_layers"), keys.get(key)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise keys.wrong(key, f"{num_layers} entries, each one of {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in kinds]
