"""Step-3.5, which is the decoder of Step-3.7, too."""

from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, RopeFacts, Routing
from quire.checkpoint.families.decoder import check_heads, decoder, sliding_window
from quire.checkpoint.families.dense import only, with_defaults
from quire.checkpoint.families.moe import drafting
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of, read_rope

_KINDS = ("full_attention", "sliding_attention")
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""What StepFun calls it, and what transformers does."""
_ONLY = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "sink": False,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
}


def step35(keys: ConfigReader) -> ArchFacts:
    """Layers with windows have a number of heads of their own, and every head's output has a gate. Lists that
    say something of each layer also do of those that draft, behind the last."""
    for key, value in _ONLY.items():
        only(keys, key, value)
    keys = with_defaults(keys, **{new: keys.get(old) for old, new in _NAMES.items()})
    head_dim, biased, count = keys.size("head_dim", 128), keys.flag("attention_bias"), _count(keys)
    layers = _layers(keys, head_dim)
    return decoder(
        keys,
        head_dim=head_dim,
        layers=layers[:count],
        predicting=layers[count] if len(layers) > count else None,
        norm="rms_plus_one",
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=keys.flag("mlp_bias"),
        qk_norm="head",
        head_gate=True,
        attention_scale=keys.number("query_pre_attn_scalar", head_dim) ** -0.5,
        max_len=max_len_of(keys),
        unused=drafting(keys),
        moe=_experts(keys),
    )


def _count(keys: ConfigReader) -> int:
    return keys.size("num_hidden_layers")


def _experts(keys: ConfigReader) -> MoeFacts:
    return MoeFacts(
        experts=keys.size("n_routed_experts"),
        intermediate=keys.size("moe_intermediate_size"),
        routing=Routing(
            keys.size("num_experts_per_tok"),
            scoring="sigmoid",
            renormalized=keys.flag("norm_expert_weight", True),
            scale=keys.number("moe_router_scaling_factor", 1.0),
        ),
        choice_bias=keys.flag("use_moe_router_bias", True),
        wide_router=keys.flag("need_fp32_gate", True),
        shared_intermediate=keys.size("share_expert_dim"),
        names="step",
    )


def _layers(keys: ConfigReader, head_dim: int) -> tuple[LayerFacts, ...]:
    """Those that draft last."""
    kinds = _each(keys, "layer_types", _KINDS[0], more="mtp_layer_types")
    if not {*kinds} <= {*_KINDS}:
        raise keys.wrong("layer_types", f"one of {', '.join(_KINDS)} for each layer")
    ropes, turning = _ropes(keys, head_dim, kinds), _each(keys, "use_rope_layers", True)
    window, heads = sliding_window(keys, None), _heads_of_windows(keys, head_dim)
    bounds = zip(_each(keys, "swiglu_limits_shared"), _each(keys, "swiglu_limits"), strict=True)
    sparse, layers = _sparse(keys), list[LayerFacts]()
    for kind, rope, turns, (bound, expert_bound) in zip(kinds, ropes, turning, bounds, strict=True):
        layer = LayerFacts(
            rope if turns else None,
            moe=len(layers) in sparse,
            activation=_bounded(keys, bound),
            expert_activation=_bounded(keys, expert_bound),
        )
        layers.append(layer if kind == _KINDS[0] else replace(layer, window=window, heads=heads))
    return tuple(layers)


def _bounded(keys: ConfigReader, bound: float | None) -> str:
    if not bound:
        return "silu"
    if isinstance(bound, bool) or not isinstance(bound, int | float) or bound < 0:
        raise keys.wrong("swiglu_limits", "a bound for each layer, or 0")
    return f"silu<{float(bound)}"


def _ropes(keys: ConfigReader, head_dim: int, kinds: list[str]) -> list[RopeFacts]:
    """Where each layer says how it turns, only the kinds of `yarn_only_types` are stretched."""
    block = keys.get("rope_parameters")
    if isinstance(block, dict) and all(isinstance(block.get(kind), dict) for kind in kinds):
        by_kind = {kind: read_rope(keys.but(rope_parameters=block[kind]), head_dim) for kind in {*kinds}}
        return [by_kind[kind] for kind in kinds]
    stretched, scaling = keys.get("yarn_only_types") or _KINDS, keys.get("rope_scaling") or block
    each = zip(kinds, _each(keys, "rope_theta"), _each(keys, "partial_rotary_factors"), strict=True)
    return [
        read_rope(
            keys.but(
                rope_parameters=None,
                rope_theta=theta,
                partial_rotary_factor=part,
                rope_scaling=scaling if kind in stretched else None,
            ),
            head_dim,
        )
        for kind, theta, part in each
    ]


def _heads_of_windows(keys: ConfigReader, head_dim: int) -> int:
    """Of layers with windows; 0: as many as others have."""
    other = keys.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        raise keys.wrong("attention_other_setting", "an object")
    own = ConfigReader(f"{keys.source}, attention_other_setting", other)
    only(own, "attention_type", _KINDS[1])
    only(own, "num_attention_groups", keys.get("num_key_value_heads"))
    only(own, "head_dim", head_dim)
    said = [keys.size("num_sliding_attention_heads")] if keys.get("num_sliding_attention_heads") else []
    said += [own.size("num_attention_heads")] if own.get("num_attention_heads") else []
    for heads in said:
        check_heads(keys.source, heads, keys.size("num_key_value_heads"))
    return said[0] if said else 0


def _sparse(keys: ConfigReader) -> set[int]:
    """The layers with experts, by their numbers or by a name for each."""
    kinds, given = keys.get("mlp_layer_types"), keys.get("moe_layers_enum")
    if kinds is not None:
        kinds = _each(keys, "mlp_layer_types", more="mtp_mlp_layer_types")
        return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
    if given is None:
        return set(range(3, _count(keys)))
    numbers = given.split(",") if isinstance(given, str) else given
    try:
        return {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise keys.wrong("moe_layers_enum", "numbers of layers with commas between them") from None


def _each(keys: ConfigReader, key: str, default: Any = None, more: str = "") -> list[Any]:
    """What is said of each layer, or of all; of those that draft, which may be said elsewhere, too."""
    count, given, behind = _count(keys), keys.get(key), keys.get("num_nextn_predict_layers") or 0
    if not isinstance(given, list):
        return [default if given is None else given] * (count + behind)
    if given and len(given) < count:
        raise keys.wrong(key, f"{count} entries")
    given = [*given[: count + behind], *(keys.get(more) or [])]
    return given + [default] * (count + behind - len(given))
