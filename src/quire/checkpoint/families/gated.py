"""Decoders with gated attention or sinks, windows and experts: Beam, Flint, Kolibri 1, Laguna."""

from dataclasses import replace

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.checkpoint.families.decoder import (
    check_heads,
    decoder,
    full_every,
    ropes_by_kind,
    sliding_window,
    windows_by_kind,
)
from quire.checkpoint.families.moe import (
    add_experts,
    deepseek_experts,
    first_dense,
    qwen_sparse_layers,
    read_experts,
)
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of, read_rope


def flint(keys: ConfigReader) -> ArchFacts:
    """Read Flint: Qwen 3's attention with sinks, rotary embedding in window layers only, sigmoid routing."""
    count = keys.size("num_hidden_layers")
    default = [
        "full_attention" if i < 2 or i % 4 == 1 or i == count - 1 else "sliding_attention"
        for i in range(count)
    ]
    windows = windows_by_kind(keys, sliding_window(keys, 513), default=default)
    facts = decoder(
        keys,
        head_dim=128,
        windows=windows,
        rotates=[window is not None for window in windows],
        qk_norm="head",
        attention_bias=keys.flag("attention_bias"),
        sinks=True,
    )
    moe = read_experts(keys, "moe_intermediate_size", keys.flag("norm_topk_prob", True), scoring="sigmoid")
    shared = keys.size("shared_expert_intermediate_size", 1024)
    sparse = qwen_sparse_layers(keys.defaults(mlp_only_layers=[0, 1]))
    return add_experts(facts, replace(moe, shared_intermediate=shared, wide_router=True), sparse)


def kolibri(keys: ConfigReader) -> ArchFacts:
    """Read Kolibri 1: Qwen 3's attention, rotary embedding in window layers only, sigmoid routing."""
    window = sliding_window(keys, 513)
    windows = windows_by_kind(keys, window, default=full_every(keys, 5))
    facts = decoder(
        keys,
        head_dim=128,
        windows=windows,
        rotates=[window is None or layer_window is not None for layer_window in windows],
        qk_norm="head",
        intermediate=keys.size("moe_intermediate_size"),
    )
    moe = read_experts(keys, "moe_intermediate_size", keys.flag("norm_topk_prob"), scoring="sigmoid")
    shared = keys.size("shared_expert_intermediate_size", 512)
    return add_experts(
        facts, replace(moe, shared_intermediate=shared, choice_bias=True, wide_router=True, names="deepseek")
    )


def laguna(keys: ConfigReader) -> ArchFacts:
    """Read Laguna: Qwen 3's attention with a gate, windows, and a number of heads per layer."""
    keys.require("moe_apply_router_weight_on_input", False)
    keys.require("moe_router_logit_softcapping", 0.0)
    count, kinds = keys.size("num_hidden_layers"), ("full_attention", "sliding_attention")
    if keys.get("rope_parameters") is None:
        full = {"rope_theta": 500000.0, "partial_rotary_factor": 0.5}
        keys = keys.but(rope_parameters={kinds[0]: full, kinds[1]: {"rope_theta": 10000.0}})
    windows = windows_by_kind(keys, sliding_window(keys, 512), default=[kinds[0]] * count)
    ropes, heads = ropes_by_kind(keys, keys.size("head_dim", 128), *kinds), keys.size("num_attention_heads")
    layer_heads = keys.integers("num_attention_heads_per_layer") or [heads] * count
    if len(layer_heads) != count or any(n <= 0 for n in layer_heads):
        raise keys.wrong("num_attention_heads_per_layer", f"{count} positive numbers")
    gating = keys.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise keys.wrong("gating", "true, per-head or per-element")
    facts = decoder(
        keys,
        head_dim=128,
        layers=tuple(
            LayerFacts(ropes[kinds[window is not None]], window, heads=n)
            for window, n in zip(windows, layer_heads, strict=True)
        ),
        attention_bias=keys.flag("attention_bias"),
        qk_norm="head",
        head_gate=gating != "per-element",
        output_gate=gating == "per-element",
    )
    for n in layer_heads:
        check_heads(keys.source, n, facts.kv_heads)
    moe = read_experts(
        keys,
        "moe_intermediate_size",
        True,
        scoring="sigmoid",
        scale=keys.number("moe_routed_scaling_factor", 1.0),
        choice_bias=True,
        shared_intermediate=keys.size("shared_expert_intermediate_size", 512),
        names="laguna",
    )
    return add_experts(facts, moe, first_dense(keys, 1))


def beam(keys: ConfigReader) -> ArchFacts:
    """Read Beam: gated attention, rotary embedding in window layers only, residual sums weighted by depth."""
    count, kinds = keys.size("num_hidden_layers"), ("sliding_attention", "full_attention")
    default = [kinds[(i + 1) % 6 == 0 or i == count - 1] for i in range(count)]
    block = keys.get("rope_parameters") or {kinds[0]: {"rope_theta": 10000.0}, kinds[1]: None}
    if not isinstance(block, dict) or not isinstance(block.get(kinds[0]), dict):
        raise keys.wrong("rope_parameters", f"an object with an entry {kinds[0]}")
    if block.get(kinds[1]) is not None:
        raise keys.wrong("rope_parameters", f"null for {kinds[1]} (nothing else is supported)")
    windows = windows_by_kind(keys, sliding_window(keys, 512), default=default)
    rope = read_rope(keys.but(rope_parameters=block[kinds[0]]), keys.size("head_dim", 128))
    layers = tuple(
        LayerFacts(
            None if window is None else rope,
            window,
            residual_scales=(*_depth_scales(2 * number + 2), *_depth_scales(2 * number + 3)),
        )
        for number, window in enumerate(windows)
    )
    facts = decoder(
        keys,
        head_dim=128,
        layers=layers,
        attention_bias=keys.flag("attention_bias"),
        qk_norm="head",
        output_gate=True,
        logit_softcap=keys.optional_number("final_logit_softcapping"),
        max_len=max_len_of(keys),
    )
    sizes = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    moe = replace(deepseek_experts(keys.defaults(**sizes), "sigmoid"), names="mlp")
    return add_experts(facts, moe, first_dense(keys, 3))


def _depth_scales(number: int) -> tuple[float, float]:
    """Return the two factors of a residual sum of Beam, which depend on its number: on the residual, and on
    the output that is added to it. Layer i has the sums 2i + 2 (after attention) and 2i + 3 (after the
    feed-forward part)."""
    return ((number - 1) / number) ** 0.5, number**-0.5
