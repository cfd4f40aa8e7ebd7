"""Decoders of which all or most layers keep a state of fixed size, and a few attend."""

import math
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import (
    ArchFacts,
    LayerFacts,
    MoeFacts,
    RopeFacts,
    Routing,
    SharedFacts,
    StateFacts,
)
from quire.checkpoint.families.decoder import decoder
from quire.checkpoint.families.dense import granite, llama, only, with_defaults
from quire.checkpoint.families.moe import deepseek_experts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope

_KINDS = {
    "linear_attention": True,
    "mamba": True,
    "conv": True,
    "full_attention": False,
    "attention": False,
}
"""What `layer_types` says -> whether such a layer keeps a state."""
_SCANS, _ATTENDS = LayerFacts(None, mixer="mamba"), LayerFacts(None)
_FEEDS, _MIXES = LayerFacts(None, mixer="none"), LayerFacts(None, mixer="none", moe=True)
_BLOCKS = {
    "mamba": _SCANS,
    "linear_attention": _SCANS,
    "M": _SCANS,
    "attention": _ATTENDS,
    "full_attention": _ATTENDS,
    "*": _ATTENDS,
    "mlp": _FEEDS,
    "-": _FEEDS,
    "moe": _MIXES,
    "E": _MIXES,
}
"""What Nemotron-H calls its layers."""


def mamba(keys: ConfigReader) -> ArchFacts:
    """Layers of Mamba, and nothing else."""
    inner = keys.size("intermediate_size", keys.size("expand", 2) * keys.size("hidden_size"))
    return _states_alone(with_defaults(keys, tie_word_embeddings=True), "selective", _selective(keys, inner))


def falcon_mamba(keys: ConfigReader) -> ArchFacts:
    """The same with norms in its layers that have no weights."""
    facts, eps = mamba(keys), keys.number("mixer_rms_eps", 1e-6)
    assert facts.state is not None
    return replace(facts, state=replace(facts.state, norm="bare", norm_eps=eps))


def mamba2(keys: ConfigReader) -> ArchFacts:
    """Layers of Mamba-2, and nothing else."""
    heads, inner = keys.size("num_heads", 128), keys.size("expand", 2) * keys.size("hidden_size")
    head_dim = keys.size("head_dim", 64)
    if heads * head_dim != inner:
        raise keys.wrong("head_dim", f"{inner} / num_heads")
    groups = keys.size("n_groups", 8)
    state = StateFacts(
        heads=heads,
        head_dim=head_dim,
        state=keys.size("state_size", 128),
        groups=groups,
        norm_groups=groups,
        conv=keys.size("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        proj_bias=keys.flag("use_bias"),
        time_limits=_time_limits(keys),
    )
    return _states_alone(keys, "mamba", state)


def _states_alone(keys: ConfigReader, mixer: str, state: StateFacts) -> ArchFacts:
    """A layer is a norm and a mixer. Nothing attends: heads are one, for who asks."""
    only(keys, "hidden_act", "silu")
    return decoder(
        keys.but(num_attention_heads=1, num_key_value_heads=1, head_dim=64),
        layers=(LayerFacts(None, mixer=mixer),) * keys.size("num_hidden_layers"),
        eps_key="layer_norm_epsilon" if keys.get("layer_norm_epsilon") is not None else "rms_norm_eps",
        intermediate=0,
        state=state,
    )


_SELECTIVE = ("time_step_rank", "state_size", "conv_kernel", "use_conv_bias", "use_bias")
_JAMBAS = ("mamba_dt_rank", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")


def _selective(keys: ConfigReader, inner: int, names: tuple[str, ...] = _SELECTIVE) -> StateFacts:
    """Mamba of so many channels; `names` are those of its other sizes."""
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
    """Mamba with norms, every so many layers attention that does not turn; experts in some layers of both."""
    every, first = keys.size("attn_layer_period", 8), _number(keys, "attn_layer_offset", 4)
    sparse_every, sparse_first = keys.size("expert_layer_period", 2), _number(keys, "expert_layer_offset", 1)
    numbers, moe = range(keys.size("num_hidden_layers")), None
    inner = keys.size("mamba_expand", 2) * keys.size("hidden_size")
    if keys.size("num_experts", 16) > 1:
        moe = MoeFacts(
            experts=keys.size("num_experts", 16),
            intermediate=keys.size("intermediate_size"),
            routing=Routing(keys.size("num_experts_per_tok", 2)),
            names="jamba",
        )
    sparse = [moe is not None and i % sparse_every == sparse_first for i in numbers]
    return decoder(
        keys,
        layers=_layers([i % every != first for i in numbers], sparse, "selective", None),
        moe=moe,
        state=replace(_selective(keys, inner, _JAMBAS), norm="weighed"),
    )


def lfm2(keys: ConfigReader) -> ArchFacts:
    """Short convolutions between gates, and attention where `full_attn_idxs` says."""
    inner = keys.size("intermediate_size" if keys.get("block_ff_dim") is None else "block_ff_dim")
    if keys.flag("block_auto_adjust_ff_dim", True):
        inner, unit = 2 * inner // 3, keys.size("block_multiple_of", 256)
        inner = int(keys.number("block_ffn_dim_multiplier", 1.0) * inner)
        inner = -(-inner // unit) * unit
    return _convolved(keys, [False] * keys.size("num_hidden_layers"), intermediate=inner)


def lfm2_moe(keys: ConfigReader) -> ArchFacts:
    """The same with experts in all but the first layers."""
    count, dense = keys.size("num_hidden_layers"), _number(keys, "num_dense_layers", 2)
    moe = MoeFacts(
        experts=keys.size("num_experts", 32),
        intermediate=keys.size("moe_intermediate_size"),
        routing=Routing(
            keys.size("num_experts_per_tok", 4),
            scoring="sigmoid",
            renormalized=keys.flag("norm_topk_prob", True),
            scale=keys.number("routed_scaling_factor", 1.0),
        ),
        choice_bias=keys.flag("use_expert_bias", True),
        names="lfm2",
    )
    return _convolved(keys, [i >= dense for i in range(count)], moe=moe)


def _convolved(keys: ConfigReader, sparse: list[bool], **facts: Any) -> ArchFacts:
    hidden, attending = keys.size("hidden_size"), keys.get("full_attn_idxs")
    keys = with_defaults(keys, norm_eps=1e-5, rope_theta=1e6)
    tied = "tie_embedding" if keys.get("tie_embedding") is not None else "tie_word_embeddings"
    if keys.get("layer_types") is None:
        attending = range(len(sparse)) if attending is None else _numbers(keys, "full_attn_idxs")
        kinds = ["full_attention" if i in attending else "conv" for i in range(len(sparse))]
        keys = keys.but(layer_types=kinds)
    rope = read_rope(keys, keys.size("head_dim", hidden // keys.size("num_attention_heads")))
    return decoder(
        keys,
        layers=_layers(_stateful(keys, "layer_types"), sparse, "conv", rope),
        eps_key="norm_eps",
        qk_norm="head",
        tied=keys.flag(tied, True),
        state=StateFacts(
            heads=hidden,
            head_dim=1,
            state=0,
            groups=0,
            conv=keys.size("conv_L_cache", 3),
            conv_bias=keys.flag("conv_bias"),
            proj_bias=keys.flag("conv_bias"),
        ),
        **facts,
    )


def falcon_h1(keys: ConfigReader) -> ArchFacts:
    """Attention and Mamba-2 side by side in each layer; factors nearly everywhere."""
    facts = llama(with_defaults(keys, rms_norm_eps=1e-5))
    inner = keys.size("mamba_d_ssm", keys.size("mamba_expand", 2) * facts.hidden)
    state, into = _mamba(keys, inner), keys.number("ssm_in_multiplier", 1.0)
    if keys.flag("projectors_bias") != state.proj_bias or (state.proj_bias and into != 1):
        raise keys.wrong("projectors_bias", "what mamba_proj_bias is, and with a bias ssm_in_multiplier 1")
    norm = "gate_last" if keys.flag("mamba_norm_before_gate", True) else "gate_first"
    scales = _factors(keys, "ssm_multipliers", 5)
    key_scale = keys.number("key_multiplier", 1.0)
    gate, down = _factors(keys, "mlp_multipliers", 2)
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


def _number(keys: ConfigReader, key: str, default: int) -> int:
    """That of a layer."""
    found = keys.get(key)
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 0):
        raise keys.wrong(key, "the number of a layer")
    return default if found is None else found


def _numbers(keys: ConfigReader, key: str) -> list[int]:
    """Those of layers; none where nothing is said."""
    found = keys.get(key) or []
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise keys.wrong(key, "a list of numbers of layers")
    return found


def _factors(keys: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """So many numbers; 1 where nothing is said."""
    found = keys.get(key)
    if found is None:
        return (1.0,) * count
    known = isinstance(found, list) and all(isinstance(factor, int | float) for factor in found)
    if not known or len(found) != count:
        raise keys.wrong(key, f"{count} numbers")
    return tuple(map(float, found))


def zamba2(keys: ConfigReader) -> ArchFacts:
    """Mamba-2, and in front of some layers a block of attention and feed-forward that they share."""
    only(keys, "tie_word_embeddings", True)
    only(keys, "use_long_context", False)
    hidden, heads = keys.size("hidden_size"), keys.size("n_mamba_heads", 8)
    head_dim = keys.size("attention_head_dim", 2 * hidden // keys.size("num_attention_heads"))
    rope = read_rope(keys.but(head_dim=head_dim), head_dim) if keys.flag("use_mem_rope") else None
    key = "layers_block_type" if keys.get("layers_block_type") is not None else "layer_types"
    kinds, num_blocks = keys.get(key), keys.size("num_mem_blocks", 1)
    if not isinstance(kinds, list) or any(kind not in ("hybrid", *_KINDS) for kind in kinds):
        raise keys.wrong(key, "for each layer mamba, linear_attention or hybrid")
    uses = [number for number, kind in enumerate(kinds) if kind == "hybrid"]
    using = {
        number: LayerFacts(rope, mixer="attention+mamba", block=uses[use % num_blocks], use=use)
        for use, number in enumerate(uses)
    }
    groups = keys.size("mamba_ngroups", 1)
    return decoder(
        with_defaults(keys, intermediate_size=4 * hidden, hidden_act="gelu", rms_norm_eps=1e-5).but(
            head_dim=head_dim, tie_word_embeddings=True
        ),
        layers=tuple(using.get(number, _SCANS) for number in range(len(kinds))),
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
    """Granite 4: Mamba-2, and attention that mostly does not turn."""
    kinds = _stateful(keys, "layers_block_type" if keys.get("layer_types") is None else "layer_types")
    facts, moe = granite(keys), None
    if keys.get("num_local_experts"):
        moe = MoeFacts(
            experts=keys.size("num_local_experts"),
            intermediate=keys.size("intermediate_size"),
            routing=Routing(keys.size("num_experts_per_tok"), renormalized=True),
            shared_intermediate=keys.size("shared_intermediate_size"),
            names="granite",
        )
    rope = facts.layers[0].rope if keys.get("position_embedding_type") == "rope" else None
    return replace(
        facts,
        layers=_layers(kinds, [moe is not None] * len(kinds), "mamba", rope),
        intermediate=keys.size("shared_intermediate_size"),
        moe=moe,
        state=_mamba(keys, keys.size("mamba_expand", 2) * facts.hidden),
    )


def bamba(keys: ConfigReader) -> ArchFacts:
    """Mamba-2, and attention where `attn_layer_indices` says, of which half turns."""
    attending, count = _numbers(keys, "attn_layer_indices"), keys.size("num_hidden_layers")
    keys = with_defaults(keys, rms_norm_eps=1e-5).but(partial_rotary_factor=0.5)
    facts = llama(keys)
    scans = [i not in attending for i in range(count)]
    return replace(
        facts,
        layers=_layers(scans, [False] * count, "mamba", facts.layers[0].rope),
        state=_mamba(keys, keys.size("mamba_expand", 2) * facts.hidden),
    )


def _mamba(keys: ConfigReader, inner: int) -> StateFacts:
    heads, named = keys.size("mamba_n_heads", 128), keys.get("mamba_d_head") not in (None, "auto")
    groups = keys.size("mamba_n_groups", 1)
    head_dim = keys.size("mamba_d_head") if named else inner // heads
    if heads * head_dim != inner:
        raise keys.wrong("mamba_d_head", f"{inner} / mamba_n_heads")
    return StateFacts(
        heads=heads,
        head_dim=head_dim,
        state=keys.size("mamba_d_state", 256),
        groups=groups,
        norm_groups=groups,
        conv=keys.size("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        proj_bias=keys.flag("mamba_proj_bias"),
        time_limits=_time_limits(keys),
    )


def _time_limits(keys: ConfigReader, least: str = "") -> tuple[float, float]:
    """The least and the most that a time step may be; where transformers reads a lower bound of its own,
    `least` is its key."""
    found = keys.get("time_step_limit")
    found = [0, math.inf] if found is None else found
    if isinstance(found, list):  # transformers writes {"__float__": "Infinity"}
        found = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in found]
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(x, int | float) for x in found):
        raise keys.wrong("time_step_limit", "two numbers")
    low, high = map(float, found)
    if least:
        own = keys.get(least)
        if own is not None and (not isinstance(own, int | float) or own < 0):
            raise keys.wrong(least, "a number that is not below 0")
        low = max(low, 1e-3 if own is None else float(own))
    return low, high


def nemotron_h(keys: ConfigReader) -> ArchFacts:
    """A layer is Mamba-2, attention that does not turn, experts or a plain feed-forward; the last two keep
    nothing."""
    only(keys, "mamba_hidden_act", "silu")
    only(keys, "mlp_hidden_act", "relu2")
    only(keys, "sliding_window", None)
    layers = _blocks(keys)
    moe = None
    if any(layer.moe for layer in layers):
        moe = replace(
            deepseek_experts(keys, "sigmoid"),
            plain=True,
            latent=keys.size("moe_latent_size") if keys.get("moe_latent_size") else 0,
            shared_intermediate=keys.size("moe_shared_expert_intermediate_size"),
            names="nemotron_h",
        )
    groups, biased = keys.size("n_groups", 8), keys.flag("attention_bias")
    return decoder(
        with_defaults(keys, layer_norm_epsilon=1e-5, mlp_hidden_act="relu2"),
        head_dim=128,
        layers=layers,
        activation_key="mlp_hidden_act",
        eps_key="layer_norm_epsilon",
        qkv_bias=biased,
        out_bias=biased,
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


def _blocks(keys: ConfigReader) -> tuple[LayerFacts, ...]:
    """A list of names, or a letter for each layer."""
    known = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in known if keys.get(key) is not None), known[0])
    kinds = keys.get(key)
    if not isinstance(kinds, (list, str)) or any(kind not in _BLOCKS for kind in kinds):
        raise keys.wrong(key, f"for each layer one of {', '.join(_BLOCKS)}")
    return tuple(_BLOCKS[kind] for kind in kinds)


def qwen3_next(keys: ConfigReader) -> ArchFacts:
    """Gated delta, and every fourth layer gated attention; experts in most layers."""
    num_layers, step = keys.size("num_hidden_layers"), keys.size("decoder_sparse_step", 1)
    dense, experts = keys.integers("mlp_only_layers"), keys.get("num_experts") or 0
    moe = None
    if experts:
        moe = MoeFacts(
            experts=keys.size("num_experts"),
            intermediate=keys.size("moe_intermediate_size"),
            routing=Routing(keys.size("num_experts_per_tok"), renormalized=keys.flag("norm_topk_prob", True)),
            shared_intermediate=keys.size("shared_expert_intermediate_size"),
            shared_gate=True,
        )
    sparse = [bool(moe) and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    return _gated_delta(keys, sparse, moe=moe)


def qwen3_5(keys: ConfigReader) -> ArchFacts:
    """The same without experts."""
    return _gated_delta(keys, [False] * keys.size("num_hidden_layers"))


def _gated_delta(keys: ConfigReader, sparse: list[bool], **facts: Any) -> ArchFacts:
    if keys.get("partial_rotary_factor") is None:
        keys = keys.but(partial_rotary_factor=0.25)
    head_dim, biased = keys.size("head_dim", 256), keys.flag("attention_bias")
    rope, every = read_rope(keys, head_dim), keys.size("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(len(sparse))]
    kinds = _stateful(keys if keys.get("layer_types") else keys.but(layer_types=default), "layer_types")
    if all(sparse):
        facts["intermediate"] = keys.size("intermediate_size", keys.size("moe_intermediate_size"))
    return decoder(
        keys,
        head_dim=head_dim,
        layers=_layers(kinds, sparse, "delta", rope),
        norm="rms_plus_one",
        qk_norm="head",
        output_gate=True,
        qkv_bias=biased,
        out_bias=biased,
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


def _layers(
    stateful: list[bool], sparse: list[bool], mixer: str, rope: RopeFacts | None
) -> tuple[LayerFacts, ...]:
    """Those that keep a state do so by `mixer`."""
    return tuple(
        LayerFacts(None, mixer=mixer, moe=moe) if keeps else LayerFacts(rope, moe=moe)
        for keeps, moe in zip(stateful, sparse, strict=True)
    )


def _stateful(keys: ConfigReader, key: str) -> list[bool]:
    """For each layer, whether it keeps a state."""
    num_layers, kinds = keys.size("num_hidden_layers"), keys.get(key)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise keys.wrong(key, f"{num_layers} entries, each one of {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in kinds]
