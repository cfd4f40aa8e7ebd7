"""Step3, and Step-3.5, which is also the decoder of Step-3.7."""

from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, RopeFacts, Routing
from quire.checkpoint.families.decoder import FULL, SLIDING, check_heads, decoder, sliding_window
from quire.checkpoint.families.moe import mtp_pattern, read_experts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of, read_rope

_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""Maps StepFun's keys to those of transformers."""
_DENSE_LAYERS = 4
"""Number of first layers of Step3 without experts, if config.json does not list the MoE layers. In this case
the last layer has no experts, either."""
_ONLY = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "sink": False,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
}


def step3(keys: ConfigReader) -> ArchFacts:
    """Read Step3. All query heads share one key and value head, and a low-rank projection (MFA)."""
    keys.require("num_attention_groups", 1)
    keys = keys.defaults(max_position_embeddings=keys.get("max_position_embedding")).but(
        num_key_value_heads=1
    )
    head_dim = keys.size("head_dim", 256)
    rope, sparse = read_rope(keys, head_dim), _sparse_layers(keys, range(_DENSE_LAYERS, _count(keys) - 1))
    return decoder(
        keys,
        head_dim=head_dim,
        layers=tuple(LayerFacts(rope, moe=i in sparse) for i in range(_count(keys))),
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        query_rank=keys.size("share_q_dim", head_dim),
        moe=MoeFacts(
            experts=keys.size("moe_num_experts"),
            intermediate=keys.size("moe_intermediate_size"),
            routing=Routing(keys.size("moe_top_k"), renormalized=keys.flag("norm_expert_weight")),
            shared_intermediate=keys.size("share_expert_dim"),
            names="step",
        ),
    )


def step35(keys: ConfigReader) -> ArchFacts:
    """Read Step-3.5. Window layers have another number of heads, and each head's output has a gate. Lists
    with a value per layer also cover the MTP layers after the last layer."""
    for key, value in _ONLY.items():
        keys.require(key, value)
    keys = keys.renamed(_KEYS)
    head_dim, biased, count = keys.size("head_dim", 128), keys.flag("attention_bias"), _count(keys)
    layers = _read_layers(keys, head_dim)
    return decoder(
        keys,
        head_dim=head_dim,
        layers=layers[:count],
        predicting=layers[count] if len(layers) > count else None,
        norm="rms_plus_one",
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        attention_bias=biased,
        mlp_bias=keys.flag("mlp_bias"),
        qk_norm="head",
        head_gate=True,
        attention_scale=keys.number("query_pre_attn_scalar", head_dim) ** -0.5,
        max_len=max_len_of(keys),
        unused=mtp_pattern(keys),
        moe=_experts(keys),
    )


def _count(keys: ConfigReader) -> int:
    return keys.size("num_hidden_layers")


def _experts(keys: ConfigReader) -> MoeFacts:
    return read_experts(
        keys,
        "moe_intermediate_size",
        keys.flag("norm_expert_weight", True),
        scoring="sigmoid",
        scale=keys.number("moe_router_scaling_factor", 1.0),
        choice_bias=keys.flag("use_moe_router_bias", True),
        wide_router=keys.flag("need_fp32_gate", True),
        shared_intermediate=keys.size("share_expert_dim"),
        names="step",
    )


def _read_layers(keys: ConfigReader, head_dim: int) -> tuple[LayerFacts, ...]:
    """Read all layers, followed by the MTP layers."""
    kinds = _per_layer(keys, "layer_types", FULL, more="mtp_layer_types")
    if not {*kinds} <= {FULL, SLIDING}:
        raise keys.wrong("layer_types", f"one of {FULL}, {SLIDING} for each layer")
    ropes, rotates = _ropes(keys, head_dim, kinds), _per_layer(keys, "use_rope_layers", True)
    window, heads = sliding_window(keys, None), _window_heads(keys, head_dim)
    bounds = zip(_per_layer(keys, "swiglu_limits_shared"), _per_layer(keys, "swiglu_limits"), strict=True)
    sparse, layers = _sparse_layers(keys, range(3, _count(keys))), list[LayerFacts]()
    for kind, rope, rotated, (bound, expert_bound) in zip(kinds, ropes, rotates, bounds, strict=True):
        layer = LayerFacts(
            rope if rotated else None,
            moe=len(layers) in sparse,
            activation=_bounded_silu(keys, bound),
            expert_activation=_bounded_silu(keys, expert_bound),
        )
        layers.append(layer if kind == FULL else replace(layer, window=window, heads=heads))
    return tuple(layers)


def _bounded_silu(keys: ConfigReader, bound: float | None) -> str:
    if not bound:
        return "silu"
    if isinstance(bound, bool) or not isinstance(bound, int | float) or bound < 0:
        raise keys.wrong("swiglu_limits", "a bound for each layer, or 0")
    return f"silu<{float(bound)}"


def _ropes(keys: ConfigReader, head_dim: int, kinds: list[str]) -> list[RopeFacts]:
    """Return the rope of each layer. Without an object per layer type, only the types in `yarn_only_types`
    have rope scaling."""
    block = keys.get("rope_parameters")
    if isinstance(block, dict) and all(isinstance(block.get(kind), dict) for kind in kinds):
        by_kind = {kind: read_rope(keys.but(rope_parameters=block[kind]), head_dim) for kind in {*kinds}}
        return [by_kind[kind] for kind in kinds]
    stretched, scaling = keys.get("yarn_only_types") or (FULL, SLIDING), keys.get("rope_scaling") or block
    settings = zip(
        kinds, _per_layer(keys, "rope_theta"), _per_layer(keys, "partial_rotary_factors"), strict=True
    )
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
        for kind, theta, part in settings
    ]


def _window_heads(keys: ConfigReader, head_dim: int) -> int:
    """Return the number of query heads of window layers; 0: the same as in full-attention layers."""
    other = keys.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        raise keys.wrong("attention_other_setting", "an object")
    settings = ConfigReader(f"{keys.source}, attention_other_setting", other)
    settings.require("attention_type", SLIDING)
    settings.require("num_attention_groups", keys.get("num_key_value_heads"))
    settings.require("head_dim", head_dim)
    counts = [keys.size("num_sliding_attention_heads")] if keys.get("num_sliding_attention_heads") else []
    counts += [settings.size("num_attention_heads")] if settings.get("num_attention_heads") else []
    for heads in counts:
        check_heads(keys.source, heads, keys.size("num_key_value_heads"))
    return counts[0] if counts else 0


def _sparse_layers(keys: ConfigReader, default: range) -> set[int]:
    """Return the indices of the MoE layers, from a list of indices or of a type for each layer; by default
    `default`."""
    kinds, listed = keys.get("mlp_layer_types"), keys.get("moe_layers_enum")
    if kinds is not None:
        kinds = _per_layer(keys, "mlp_layer_types", more="mtp_mlp_layer_types")
        return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
    if listed is None:
        return set(default)
    numbers = listed.split(",") if isinstance(listed, str) else listed
    try:
        return {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise keys.wrong("moe_layers_enum", "numbers of layers with commas between them") from None


def _per_layer(keys: ConfigReader, key: str, default: Any = None, more: str = "") -> list[Any]:
    """Return the value of each layer under `key`: a list, or one value for all layers. MTP layers are
    included; their values may be under the key `more`."""
    count, values, num_mtp = _count(keys), keys.get(key), keys.count("num_nextn_predict_layers")
    if not isinstance(values, list):
        return [default if values is None else values] * (count + num_mtp)
    if values and len(values) < count:
        raise keys.wrong(key, f"{count} entries")
    values = [*values[: count + num_mtp], *(keys.get(more) or [])]
    return values + [default] * (count + num_mtp - len(values))
