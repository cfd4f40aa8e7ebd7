"""Decoders of which most layers keep a state of fixed size, and a few attend."""

import math
from dataclasses import replace
from typing import Any

from quire.config.facts import ArchFacts, LayerFacts, MoeFacts, RopeFacts, Routing, StateFacts
from quire.config.families.decoder import decoder
from quire.config.families.dense import granite, llama, only, with_defaults
from quire.config.families.moe import deepseek_experts
from quire.config.keys import Keys
from quire.config.rope import read_rope

_KINDS = {
    "linear_attention": True,
    "mamba": True,
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
_NO_LIMIT = (None, [0, math.inf], [0, {"__float__": "Infinity"}])
"""As it may be written."""


def granite_hybrid(keys: Keys) -> ArchFacts:
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
        state=_mamba(keys, facts.hidden),
    )


def bamba(keys: Keys) -> ArchFacts:
    """Mamba-2, and attention where `attn_layer_indices` says, of which half turns."""
    attending, count = keys.get("attn_layer_indices") or [], keys.size("num_hidden_layers")
    if not isinstance(attending, list) or not all(isinstance(i, int) for i in attending):
        raise keys.wrong("attn_layer_indices", "a list of numbers of layers")
    keys = with_defaults(keys, rms_norm_eps=1e-5).but(partial_rotary_factor=0.5)
    facts = llama(keys)
    scans = [i not in attending for i in range(count)]
    return replace(
        facts,
        layers=_layers(scans, [False] * count, "mamba", facts.layers[0].rope),
        state=_mamba(keys, facts.hidden),
    )


def _mamba(keys: Keys, hidden: int) -> StateFacts:
    heads, inner = keys.size("mamba_n_heads", 128), keys.size("mamba_expand", 2) * hidden
    head_dim = keys.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner // heads
    if heads * head_dim != inner:
        raise keys.wrong("mamba_d_head", f"{inner} / mamba_n_heads")
    if keys.get("time_step_limit") not in _NO_LIMIT:
        raise keys.wrong("time_step_limit", "[0, Infinity] (no other is supported)")
    return StateFacts(
        heads=heads,
        head_dim=head_dim,
        state=keys.size("mamba_d_state", 256),
        groups=keys.size("mamba_n_groups", 1),
        conv=keys.size("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        proj_bias=keys.flag("mamba_proj_bias"),
    )


def nemotron_h(keys: Keys) -> ArchFacts:
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
    if keys.get("time_step_limit") not in _NO_LIMIT:
        raise keys.wrong("time_step_limit", "[0, Infinity] (no other is supported)")
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
        ),
    )


def _blocks(keys: Keys) -> tuple[LayerFacts, ...]:
    """A list of names, or a letter for each layer."""
    known = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in known if keys.get(key) is not None), known[0])
    kinds = keys.get(key)
    if not isinstance(kinds, (list, str)) or any(kind not in _BLOCKS for kind in kinds):
        raise keys.wrong(key, f"for each layer one of {', '.join(_BLOCKS)}")
    return tuple(_BLOCKS[kind] for kind in kinds)


def qwen3_next(keys: Keys) -> ArchFacts:
    """Gated delta, and every fourth layer gated attention; experts in most layers."""
    num_layers, step = keys.size("num_hidden_layers"), keys.size("decoder_sparse_step", 1)
    dense, experts = keys.get("mlp_only_layers") or [], keys.get("num_experts") or 0
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


def qwen3_5(keys: Keys) -> ArchFacts:
    """The same without experts."""
    return _gated_delta(keys, [False] * keys.size("num_hidden_layers"))


def _gated_delta(keys: Keys, sparse: list[bool], **facts: Any) -> ArchFacts:
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


def _stateful(keys: Keys, key: str) -> list[bool]:
    """For each layer, whether it keeps a state."""
    num_layers, kinds = keys.size("num_hidden_layers"), keys.get(key)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise keys.wrong(key, f"{num_layers} entries, each one of {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in kinds]
