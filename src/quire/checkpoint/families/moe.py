"""Decoders with a mixture of experts."""

from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, Routing
from quire.checkpoint.families.alibi import databricks
from quire.checkpoint.families.decoder import (
    LAYER_NORM,
    decoder,
    full_every,
    head_dim_of,
    layer_kinds,
    ropes_by_kind,
    same_window,
    sliding_window,
    windows_by_kind,
)
from quire.checkpoint.families.dense import (
    cohere,
    ernie,
    exaone4,
    granite,
    granite_swa,
    hunyuan,
    olmo2,
    qwen2,
    qwen3,
)
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope


def mixtral(keys: ConfigReader) -> ArchFacts:
    facts = decoder(keys, head_dim=None, windows=same_window(sliding_window(keys, None), keys))
    return add_experts(facts, read_experts(keys, "intermediate_size", True, names="mixtral"))


def phimoe(keys: ConfigReader) -> ArchFacts:
    """Read Phi-3.5-MoE. With longrope, config.json has the attention factor (long_mscale)."""
    keys.require("num_experts_per_tok", 2)
    for name in ("rope_parameters", "rope_scaling"):
        block = keys.get(name)
        if isinstance(block, dict) and block.get("long_mscale") is not None:
            if block["long_mscale"] != block.get("short_mscale"):
                raise keys.wrong(name, "the same short_mscale and long_mscale (nothing else is supported)")
            keys = keys.but(**{name: block | {"attention_factor": block["long_mscale"]}})
    facts = decoder(
        keys.defaults(rope_theta=1e6, rms_norm_eps=1e-5),
        windows=same_window(sliding_window(keys, None), keys),
        **LAYER_NORM,
        attention_bias=keys.flag("attention_bias"),
        head_bias=keys.flag("lm_head_bias"),
    )
    jitter = 2 * keys.number("router_jitter_noise", 0.01)
    moe = read_experts(keys, "intermediate_size", False, names="mixtral", sparsemixer_threshold=jitter)
    return add_experts(facts, moe)


def qwen2_moe(keys: ConfigReader) -> ArchFacts:
    return add_experts(qwen2(keys), qwen_experts(keys, keys.flag("norm_topk_prob")), qwen_sparse_layers(keys))


def qwen_experts(keys: ConfigReader, renormalized: bool) -> MoeFacts:
    """Read the experts of Qwen 2 and Qwen3-Next, with a gated shared expert."""
    moe = read_experts(keys, "moe_intermediate_size", renormalized)
    return replace(moe, shared_intermediate=keys.size("shared_expert_intermediate_size"), shared_gate=True)


def qwen3_moe(keys: ConfigReader) -> ArchFacts:
    names = "across" if keys.get("model_type") == "qwen3_vl_moe_text" else "mlp"
    moe = read_experts(keys, "moe_intermediate_size", keys.flag("norm_topk_prob"), names=names)
    head_dim = keys.size("hidden_size") // keys.size("num_attention_heads")
    return add_experts(qwen3(keys.defaults(head_dim=head_dim)), moe, qwen_sparse_layers(keys))


def mellum(keys: ConfigReader) -> ArchFacts:
    """Read Mellum: Qwen 3 MoE with another rope base in window layers."""
    keys = keys.defaults(norm_topk_prob=True, head_dim=128)
    kinds = "full_attention", "sliding_attention"
    if keys.get("rope_parameters") is None:
        bases = zip(kinds, (500000.0, 10000.0), strict=True)
        keys = keys.but(rope_parameters={kind: {"rope_theta": base} for kind, base in bases})
    full = ["full_attention"] * keys.size("num_hidden_layers")
    windows = windows_by_kind(keys, sliding_window(keys, 1024), default=full)
    ropes = ropes_by_kind(keys, keys.size("head_dim"), *kinds)
    layers = tuple(LayerFacts(ropes[kinds[window is not None]], window) for window in windows)
    biased = keys.flag("attention_bias")
    facts = decoder(keys, layers=layers, attention_bias=biased, qk_norm="head", unused=r"^mtp\.")
    moe = read_experts(keys, "moe_intermediate_size", keys.flag("norm_topk_prob"))
    return add_experts(facts, moe, first_dense(keys))


def olmoe(keys: ConfigReader) -> ArchFacts:
    clip = keys.optional_number("clip_qkv")
    facts = decoder(keys, attention_bias=keys.flag("attention_bias"), qk_norm="all", qkv_clip=clip)
    return add_experts(facts, read_experts(keys, "intermediate_size", keys.flag("norm_topk_prob")))


def flex_olmo(keys: ConfigReader) -> ArchFacts:
    facts = olmo2(keys.defaults(rope_theta=500000.0, rms_norm_eps=1e-6))
    return add_experts(facts, read_experts(keys, "intermediate_size", keys.flag("norm_topk_prob")))


def granite_moe(keys: ConfigReader) -> ArchFacts:
    """Read Granite MoE, with or without a shared expert."""
    return add_experts(granite(keys), granite_experts(keys))


def granite_moe_swa(keys: ConfigReader) -> ArchFacts:
    return add_experts(granite_swa(keys), replace(granite_experts(keys), names="granite_swa"))


def granite_experts(keys: ConfigReader) -> MoeFacts:
    shared = keys.count("shared_intermediate_size")
    return read_experts(keys, "intermediate_size", True, names="granite", shared_intermediate=shared)


def minimax_m2(keys: ConfigReader) -> ArchFacts:
    keys.require("scoring_func", "sigmoid")
    keys.require("use_qk_norm", True)
    if keys.get("rotary_dim") is not None:
        rotary_factor = keys.size("rotary_dim") / keys.size("head_dim", 128)
        keys = keys.defaults(partial_rotary_factor=rotary_factor)
    facts = decoder(keys.defaults(rope_theta=5e6), head_dim=128, qk_norm="all")
    moe = read_experts(keys, "intermediate_size", True, names="minimax", scoring="sigmoid", choice_bias=True)
    return add_experts(facts, moe)


def dots1(keys: ConfigReader) -> ArchFacts:
    """Read dots.llm1: Qwen 3's attention, DeepSeek's experts."""
    head_dim = head_dim_of(keys)
    windows = sliding_window(keys) is not None
    facts = qwen3(keys.but(head_dim=head_dim, use_sliding_window=windows).defaults(max_window_layers=62))
    moe = deepseek_experts(keys.defaults(norm_topk_prob=False), "sigmoid")
    return add_experts(facts, moe, first_dense(keys))


def exaone_moe(keys: ConfigReader) -> ArchFacts:
    """Read EXAONE MoE: EXAONE 4's attention, DeepSeek's experts."""
    shared = keys.get("num_shared_experts")
    moe = deepseek_experts(keys.but(n_shared_experts=1 if shared is None else shared), "sigmoid")
    return add_experts(exaone4(keys), replace(moe, names="exaone"), first_dense(keys, 1))


def cohere2_moe(keys: ConfigReader) -> ArchFacts:
    """Read Cohere 2 MoE. The first layers are dense and have another pattern of window layers; full-attention
    layers among them may have rotary embedding."""
    count, sparse = keys.size("num_hidden_layers"), first_dense(keys)
    first = min(sparse, default=count)
    prefix, rest = keys.size("prefix_dense_sliding_window_pattern", 1), keys.size("sliding_window_pattern", 4)
    places = [(layer, prefix) if layer < first else (layer - first, rest) for layer in range(count)]
    default = ["sliding_attention" if (at + 1) % every else "full_attention" for at, every in places]
    windows = windows_by_kind(keys, sliding_window(keys), default=default)
    rotates = [window is not None or (i not in sparse and prefix == 1) for i, window in enumerate(windows)]
    inner, scoring = keys.size("intermediate_size"), keys.get("expert_selection_fn") or "softmax"
    facts = cohere(keys.defaults(rope_theta=10000.0), windows=windows, rotates=rotates)
    if keys.get("rms_norm_eps") is not None:
        facts = replace(facts, norm="rms", norm_eps=keys.number("rms_norm_eps"))
    renormalized = scoring == "softmax" or keys.flag("norm_topk_prob", True)
    shared = inner * keys.count("num_shared_experts")
    moe = read_experts(keys, "intermediate_size", renormalized, scoring=scoring, names="deepseek")
    moe = replace(moe, shared_intermediate=shared, shared_mean=_is_mean(keys))
    if scoring not in ("softmax", "sigmoid"):
        raise keys.wrong("expert_selection_fn", "softmax or sigmoid")
    facts = replace(facts, intermediate=keys.size("prefix_dense_intermediate_size", inner))
    return add_experts(facts, moe, sparse)


def _is_mean(keys: ConfigReader) -> bool:
    key = "shared_expert_combination_strategy"
    if keys.get(key) not in (None, "average", "sum"):
        raise keys.wrong(key, "average or sum")
    return bool(keys.get(key) != "sum")


def glm4_moe(keys: ConfigReader) -> ArchFacts:
    biased, head_dim = keys.flag("attention_bias"), head_dim_of(keys)
    rope = read_rope(keys.but(partial_rotary_factor=keys.get("partial_rotary_factor") or 0.5), head_dim)
    facts = decoder(
        keys,
        head_dim=head_dim,
        layers=(LayerFacts(rope),) * keys.size("num_hidden_layers"),
        qkv_bias=biased,
        qk_norm="head" if keys.flag("use_qk_norm") else "",
    )
    facts = add_experts(facts, deepseek_experts(keys, scoring="sigmoid"), first_dense(keys))
    return replace(facts, unused=mtp_pattern(keys))


def solar_open(keys: ConfigReader) -> ArchFacts:
    """Read Solar Open: Llama's attention, DeepSeek's experts in every layer."""
    facts = decoder(
        keys.defaults(rope_theta=1e6),
        head_dim=128,
        qkv_bias=keys.flag("attention_bias"),
        intermediate=keys.size("intermediate_size", keys.size("moe_intermediate_size")),
    )
    moe = deepseek_experts(keys.defaults(n_shared_experts=1), "sigmoid")
    return replace(add_experts(facts, moe), unused=mtp_pattern(keys))


def hy3(keys: ConfigReader) -> ArchFacts:
    """Read Hunyuan 3: Qwen 3's attention, sigmoid routing in float32."""
    keys = keys.defaults(rope_theta=11158840.0, rms_norm_eps=1e-5)
    inner = keys.size("moe_intermediate_size")
    moe = read_experts(
        keys.defaults(num_experts_per_tok=8),
        "moe_intermediate_size",
        True,
        scoring="sigmoid",
        scale=keys.number("router_scaling_factor", 2.826),
        choice_bias=True,
        wide_router=True,
        shared_intermediate=inner * keys.size("num_shared_experts", 1),
        names="hy3",
    )
    facts = replace(qwen3(keys), mlp_bias=keys.flag("mlp_bias"))
    return replace(add_experts(facts, moe, first_dense(keys, 1)), unused=mtp_pattern(keys))


def afmoe(keys: ConfigReader) -> ArchFacts:
    """Read AFMoE: only window layers have rotary embedding."""
    pattern = full_every(keys, keys.size("global_attn_every_n_layers", 4))
    windows = windows_by_kind(keys, sliding_window(keys, 1024), default=pattern)
    facts = decoder(
        keys.defaults(rms_norm_eps=1e-5),
        head_dim=128,
        windows=windows,
        rotates=[window is not None for window in windows],
        qk_norm="head",
        attention_bias=keys.flag("attention_bias"),
        output_gate=True,
        embed_scale=keys.size("hidden_size") ** 0.5 if keys.flag("mup_enabled") else 1.0,
    )
    inner = keys.size("moe_intermediate_size")
    moe = read_experts(
        keys.defaults(num_experts_per_tok=6),
        "moe_intermediate_size",
        True,
        scoring="sigmoid",
        scale=keys.number("route_scale", 1.0),
        choice_bias=True,
        shared_intermediate=inner * keys.count("num_shared_experts"),
        names="afmoe",
    )
    return add_experts(
        facts, moe, first_dense(keys.but(first_k_dense_replace=keys.get("num_dense_layers")), 1)
    )


def mtp_pattern(keys: ConfigReader) -> str:
    """Return a regular expression for the tensors of the MTP layers after the last layer; empty if there are
    none. Only a draft model loads these tensors."""
    last = keys.size("num_hidden_layers")
    more = keys.count("num_nextn_predict_layers")
    return rf"\blayers\.({'|'.join(str(last + i) for i in range(more))})\." if more else ""


def ernie_moe(keys: ConfigReader) -> ArchFacts:
    inner, count = keys.size("moe_intermediate_size"), keys.size("num_hidden_layers")
    if keys.get("moe_layer_end_index") == -1:
        keys = keys.but(moe_layer_end_index=None)
    start, last = keys.count("moe_layer_start_index", 1), keys.count("moe_layer_end_index", count - 1)
    every = keys.size("moe_layer_interval", 1)
    facts = ernie(keys, head_dim=None, head_bias=keys.flag("use_bias"))
    moe = MoeFacts(
        experts=keys.size("moe_num_experts"),
        intermediate=inner,
        routing=Routing(keys.size("moe_k"), renormalized=True),
        choice_bias=True,
        shared_intermediate=inner * keys.count("moe_num_shared_experts"),
        names="ernie",
    )
    return add_experts(facts, moe, {layer for layer in range(start, last + 1) if (layer + 1) % every == 0})


def hunyuan_moe(keys: ConfigReader) -> ArchFacts:
    """Read Hunyuan MoE. A list with one value per layer must have equal values."""
    for key in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        values = keys.get(key)
        if isinstance(values, list):
            if len(set(values)) != 1:
                raise keys.wrong(key, "the same for all layers (nothing else is supported)")
            keys = keys.but(**{key: values[0]})
    inner = keys.size("moe_intermediate_size", keys.size("intermediate_size"))
    moe = MoeFacts(
        experts=keys.size("num_experts"),
        intermediate=inner,
        routing=Routing(keys.size("moe_topk", 1), renormalized=True),
        shared_intermediate=inner * keys.size("num_shared_expert", 1),
        names="hunyuan",
    )
    return add_experts(hunyuan(keys), moe)


def deepseek_experts(keys: ConfigReader, scoring: str) -> MoeFacts:
    """Read the experts of DeepSeek and derived models: expert groups, a shared expert, and with sigmoid
    `scoring` a bias that balances the load."""
    balanced = scoring == "sigmoid"
    method = keys.get("topk_method") or ("noaux_tc" if balanced else "greedy")
    grouped = method != "greedy"
    inner = keys.size("moe_intermediate_size")
    return MoeFacts(
        experts=num_experts(keys),
        intermediate=inner,
        routing=Routing(
            keys.size("num_experts_per_tok"),
            scoring=scoring,
            renormalized=keys.flag("norm_topk_prob", balanced),
            scale=keys.number("routed_scaling_factor", 1.0),
            num_groups=keys.size("n_group", 1) if grouped else 1,
            top_groups=keys.size("topk_group", 1) if grouped else 1,
            group_best=2 if balanced else 1,
        ),
        choice_bias=balanced,
        shared_intermediate=inner * keys.count("n_shared_experts"),
        names="deepseek",
    )


def dbrx(keys: ConfigReader) -> ArchFacts:
    attention = ConfigReader(f"{keys.source}, attn_config", keys.get("attn_config") or {})
    ffn = ConfigReader(f"{keys.source}, ffn_config", keys.get("ffn_config") or {})
    ffn.require("moe_normalize_expert_weights", 1.0)
    weighed = ffn.values.get("moe_normalize_expert_weights", 1.0)
    activation = (ffn.get("ffn_act_fn") or {}).get("name", "silu")
    facts = decoder(
        databricks(keys)
        .defaults(rope_theta=attention.get("rope_theta"))
        .but(num_key_value_heads=attention.size("kv_n_heads", 1), hidden_act=activation),
        norm="layer",
        eps_key="layer_norm_epsilon",
        intermediate=ffn.size("ffn_hidden_size", 3584),
        fused_qkv=True,
        qkv_clip=attention.optional_number("clip_qkv"),
    )
    moe = MoeFacts(
        experts=ffn.size("moe_num_experts", 4),
        intermediate=facts.intermediate,
        routing=Routing(ffn.size("moe_top_k", 1), renormalized=weighed is not None),
        names="dbrx",
    )
    return add_experts(facts, moe)


def llama4(keys: ConfigReader) -> ArchFacts:
    """Read Llama 4. Layers without rotary embedding scale their queries by position; layers with rotary
    embedding attend within chunks of positions."""
    count, head_dim = keys.size("num_hidden_layers"), keys.size("head_dim", 128)
    every, step = keys.size("no_rope_layer_interval", 4), keys.size("interleave_moe_layer_step", 1)
    rotates = keys.integers("no_rope_layers") or [int(bool((layer + 1) % every)) for layer in range(count)]
    if len(rotates) != count:
        raise keys.wrong("no_rope_layers", f"{count} numbers, 0 for layers without rotary embedding")
    named = keys.get("moe_layers") is not None
    sparse = keys.integers("moe_layers") if named else range(step - 1, count, step)
    rope = read_rope(keys, head_dim, pairs=True)
    chunk = keys.size("attention_chunk_size", 8192)
    chunked, full = "chunked_attention", "full_attention"
    kinds = layer_kinds(keys, chunked, full, default=[chunked if rotated else full for rotated in rotates])
    layers = tuple(
        LayerFacts(rope if rotated else None, chunk if kind == chunked else None, chunked=kind == chunked)
        for rotated, kind in zip(rotates, kinds, strict=True)
    )
    growth = keys.number("floor_scale", 8192), keys.number("attn_scale", 0.1)
    facts = decoder(
        keys,
        head_dim=head_dim,
        layers=layers,
        intermediate=keys.size("intermediate_size_mlp"),
        qk_l2_norm=keys.flag("use_qk_norm", True),
        attention_temperature=growth if keys.flag("attn_temperature_tuning", True) else None,
        attention_bias=keys.flag("attention_bias"),
    )
    moe = read_experts(
        keys.defaults(num_experts_per_tok=1),
        "intermediate_size",
        False,
        scoring="sigmoid",
        shared_intermediate=keys.size("intermediate_size"),
        weighs_input=True,
        names="llama4",
    )
    return add_experts(facts, moe, set(sparse))


def read_experts(
    keys: ConfigReader,
    inner: str,
    renormalized: bool,
    *,
    scoring: str = "softmax",
    scale: float = 1.0,
    **facts: Any,
) -> MoeFacts:
    """Read experts by the usual keys; `inner` is the key of their intermediate size, and `facts` are fields
    of MoeFacts."""
    routing = Routing(keys.size("num_experts_per_tok"), scoring, renormalized, scale)
    return MoeFacts(experts=num_experts(keys), intermediate=keys.size(inner), routing=routing, **facts)


def num_experts(keys: ConfigReader) -> int:
    """Return the number of routed experts, which has different key names in different models."""
    known = ("num_experts", "num_local_experts", "n_routed_experts")
    return keys.size(next((key for key in known if keys.get(key) is not None), known[0]))


def qwen_sparse_layers(keys: ConfigReader) -> set[int]:
    """Return the indices of Qwen's MoE layers: every `decoder_sparse_step`th layer, except
    `mlp_only_layers`."""
    step, count = keys.size("decoder_sparse_step", 1), keys.size("num_hidden_layers")
    without = keys.integers("mlp_only_layers")
    return {layer for layer in range(count) if (layer + 1) % step == 0 and layer not in without}


def first_dense(keys: ConfigReader, default: int = 0) -> set[int]:
    """Return the indices of the MoE layers: those that are sparse in `mlp_layer_types`, or all but the first
    `first_k_dense_replace` layers (`default` if that key is missing)."""
    count, kinds = keys.size("num_hidden_layers"), keys.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {"dense", "sparse"}:
            raise keys.wrong("mlp_layer_types", f"{count} entries, each dense or sparse")
        return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
    return set(range(keys.count("first_k_dense_replace", default), count))


def add_experts(facts: ArchFacts, moe: MoeFacts, sparse: set[int] | None = None) -> ArchFacts:
    """Return the facts with experts in all layers, or in the layers whose indices are in `sparse`."""
    layers = (
        replace(layer, moe=sparse is None or number in sparse) for number, layer in enumerate(facts.layers)
    )
    return replace(facts, moe=moe, layers=tuple(layers))
