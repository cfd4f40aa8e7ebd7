"""Decoders with sliding windows in most of their layers: Gemma, GPT-OSS, MiMo-V2."""

import math
from typing import Any

from quire.checkpoint.facts import AltUpFacts, ArchFacts, LayerFacts, MoeFacts, RopeFacts, Routing
from quire.checkpoint.families.decoder import (
    FULL,
    SLIDING,
    activation_of,
    decoder,
    full_every,
    kv_sharing_targets,
    layer_kinds,
    ropes_by_kind,
    sliding_window,
    unused_kv_pattern,
    windows_by_kind,
)
from quire.checkpoint.families.moe import add_experts, deepseek_experts, first_dense, read_experts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of, read_rope

_ENCODERS = r"(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\."
"""Regular expression for tensors of the encoders, which the decoder does not load."""


def gemma2(keys: ConfigReader) -> ArchFacts:
    return decoder(
        keys,
        head_dim=256,
        windows=windows_by_kind(keys, sliding_window(keys), full_every(keys, 2)),
        **_gemma_facts(keys),
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
    )


def vaultgemma(keys: ConfigReader) -> ArchFacts:
    """Read VaultGemma: Gemma 2 without norms after attention and feed-forward."""
    return gemma2(keys.defaults(attn_logit_softcapping=50.0, final_logit_softcapping=30.0))


def gemma3(keys: ConfigReader) -> ArchFacts:
    default = full_every(keys, keys.size("sliding_window_pattern", 6))
    kinds = layer_kinds(keys, FULL, SLIDING, default=default)
    ropes = _local_ropes(keys, keys.size("head_dim", 256))
    window = sliding_window(keys)
    if window is not None and keys.get("use_bidirectional_attention") is True:
        window = window // 2 + 1  # half of the window lies ahead
    windows = {FULL: None, SLIDING: window}
    return decoder(
        keys,
        head_dim=256,
        layers=tuple(LayerFacts(ropes[kind], windows[kind]) for kind in kinds),
        **_gemma_facts(keys),
        qk_norm="head",
        max_len=max_len_of(keys),  # includes rope scaling
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
    )


def gemma4(keys: ConfigReader) -> ArchFacts:
    """Read Gemma 4. Full-attention layers have another head size and may use keys as values. The last layers
    may share the KV cache of earlier layers; in some models such layers have wider feed-forward parts."""
    if keys.get("use_bidirectional_attention") == "all":
        raise keys.wrong("use_bidirectional_attention", "vision or null (nothing else is supported)")
    kinds = [*layer_kinds(keys, FULL, SLIDING, default=full_every(keys, 6))[:-1], FULL]
    targets = _kv_sharing_targets(keys, kinds)
    head_sizes = _read_head_sizes(keys, kinds)
    ropes = _read_ropes(keys, {kind: head_dim for kind, (head_dim, _) in zip(kinds, head_sizes, strict=True)})
    windows = {FULL: None, SLIDING: sliding_window(keys, 512)}
    shares_kv = keys.flag("attention_k_eq_v")
    wide = 2 * keys.size("intermediate_size") if keys.flag("use_double_wide_mlp") else 0
    layers = tuple(
        LayerFacts(
            ropes[kind],
            windows[kind],
            moe=keys.flag("enable_moe_block"),
            kv_sharing_target=target,
            head_dim=head_dim,
            kv_heads=kv_heads,
            intermediate=0 if target is None else wide,
            keys_are_values=shares_kv and kind == FULL and target is None,
        )
        for kind, target, (head_dim, kv_heads) in zip(kinds, targets, head_sizes, strict=True)
    )
    return decoder(
        keys,
        layers=layers,
        **_gemma3n_facts(keys),
        altup=_read_per_layer_embedding(keys),
        moe=_read_experts(keys) if keys.flag("enable_moe_block") else None,
        unused=f"{unused_kv_pattern(targets)}|{_ENCODERS}",
    )


def _read_head_sizes(keys: ConfigReader, kinds: list[str]) -> list[tuple[int, int]]:
    """Return for each layer its head size and its number of key/value heads."""
    head_dim, kv_heads = keys.size("head_dim", 256), keys.size("num_key_value_heads", 4)
    if keys.get("per_layer_config") is None:
        shared = keys.flag("attention_k_eq_v") and keys.get("num_global_key_value_heads") is not None
        full = (
            keys.size("global_head_dim", 512),
            keys.size("num_global_key_value_heads") if shared else kv_heads,
        )
        return [full if kind == FULL else (head_dim, kv_heads) for kind in kinds]
    per_layer = keys.get("per_layer_config")
    if not isinstance(per_layer, dict) or not all(isinstance(entry, dict) for entry in per_layer.values()):
        raise keys.wrong("per_layer_config", "an object of objects")
    layers = [
        ConfigReader(f"{keys.source}, per_layer_config", per_layer.get(str(at), {}))
        for at in range(len(kinds))
    ]
    return [
        (entry.size("head_dim", head_dim), entry.size("num_key_value_heads", kv_heads)) for entry in layers
    ]


def _read_ropes(keys: ConfigReader, sizes: dict[str, int]) -> dict[str, RopeFacts]:
    default = {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    ropes = keys.get("rope_parameters") or default
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(kind), dict) for kind in sizes):
        raise keys.wrong("rope_parameters", "an object for each kind of layer")
    return {kind: read_rope(keys.but(rope_parameters=ropes[kind]), size) for kind, size in sizes.items()}


def _read_per_layer_embedding(keys: ConfigReader) -> AltUpFacts | None:
    unified = keys.get("model_type") == "gemma4_unified_text"
    if unified or not keys.values.get("hidden_size_per_layer_input", 256):  # null: there is none
        return None
    return AltUpFacts(
        inputs=1,
        active=0,
        is_scaled=False,
        rank=0,
        per_layer=keys.size("hidden_size_per_layer_input", 256),
        vocab=keys.size("vocab_size_per_layer_input", 262144),
        media_id=(keys.token_ids("pad_token_id") or (0,))[0],
    )


def _read_experts(keys: ConfigReader) -> MoeFacts:
    """Read the experts of Gemma 4; the parallel feed-forward part counts as the shared expert."""
    return MoeFacts(
        experts=keys.size("num_experts"),
        intermediate=keys.size("moe_intermediate_size"),
        routing=Routing(keys.size("top_k_experts"), renormalized=True),
        shared_intermediate=keys.size("intermediate_size"),
        names="gemma4",
    )


def _kv_sharing_targets(keys: ConfigReader, kinds: list[str], default: int = 0) -> list[int | None]:
    """Return for each layer the index of the layer whose KV cache it uses; None: the layer has its own. The
    last num_kv_shared_layers layers share; none does if this is the number of all layers or more."""
    key = "num_kv_shared_layers"
    shared = keys.count(key, default)
    return kv_sharing_targets(keys, key, kinds, shared if shared < len(kinds) else 0)


def gemma3n(keys: ConfigReader) -> ArchFacts:
    """Read Gemma 3n. The last layers share the KV cache of the last earlier layer of their type."""
    head_dim, count = keys.size("head_dim", 256), keys.size("num_hidden_layers")
    kinds = layer_kinds(keys, FULL, SLIDING, default=full_every(keys, 5))
    windows = {FULL: None, SLIDING: sliding_window(keys, 512)}
    ropes = _local_ropes(keys, head_dim)
    targets = _kv_sharing_targets(keys, kinds, 15)
    sparse = keys.get("activation_sparsity_pattern")
    sparse = [0.95 * (at < 10 < count) for at in range(count)] if sparse is None else sparse
    layers = tuple(
        LayerFacts(
            ropes[kind],
            windows[kind],
            kv_sharing_target=targets[at],
            sparsity=float(sparse[at]),
        )
        for at, kind in enumerate(kinds)
    )
    inner = keys.get("intermediate_size")
    if isinstance(inner, list):
        if len({*inner}) != 1:
            raise keys.wrong("intermediate_size", "one number for all layers")
        keys = keys.but(intermediate_size=inner[0])
    return decoder(
        keys,
        layers=layers,
        **_gemma3n_facts(keys),
        altup=AltUpFacts(
            inputs=keys.size("altup_num_inputs", 4),
            active=keys.get("altup_active_idx") or 0,
            is_scaled=keys.flag("altup_correct_scale", True),
            rank=keys.size("laurel_rank", 64),
            per_layer=keys.size("hidden_size_per_layer_input", 256),
            vocab=keys.size("vocab_size_per_layer_input", 262144),
        ),
        unused=f"{unused_kv_pattern(targets)}|{_ENCODERS}",
    )


def _local_ropes(keys: ConfigReader, head_dim: int) -> dict[str, RopeFacts]:
    """Return the rope of each layer type; window layers may have another base."""
    ropes = ropes_by_kind(keys, head_dim, FULL, SLIDING)
    if keys.get("rope_local_base_freq") is not None:
        local = {"rope_type": "default", "rope_theta": keys.number("rope_local_base_freq")}
        ropes[SLIDING] = read_rope(keys.but(rope_parameters=local, rope_scaling=None), head_dim)
    return ropes


def _gemma_facts(keys: ConfigReader) -> dict[str, Any]:
    biased = keys.flag("attention_bias")
    return {
        "activation": activation_of(keys, "hidden_activation", "gelu_pytorch_tanh"),
        "norm": "rms_plus_one",
        "tied": keys.flag("tie_word_embeddings", True),
        "qkv_bias": biased,
        "out_bias": biased,
        "attention_scale": keys.number("query_pre_attn_scalar", 256) ** -0.5,
        "embed_scale": math.sqrt(keys.size("hidden_size")),
    }


def _gemma3n_facts(keys: ConfigReader) -> dict[str, Any]:
    """Return fields of ArchFacts for Gemma 3n and later: norms of queries and keys, and unscaled
    attention."""
    return _gemma_facts(keys) | {
        "norm": "rms",
        "attention_scale": 1.0,
        "head_dim": 256,
        "qk_norm": "head",
        "max_len": max_len_of(keys),
        "logit_softcap": keys.optional_number("final_logit_softcapping"),
    }


def mimo_v2(keys: ConfigReader) -> ArchFacts:
    """Read MiMo-V2-Flash. Window layers have sinks and twice as many key/value heads; values are smaller than
    keys."""
    head_dim = keys.size("head_dim", 192)
    kinds = layer_kinds(keys, FULL, SLIDING, default=[FULL, *full_every(keys, 6)[1:]])
    bases = {FULL: keys.number("rope_theta", 5e6)}
    bases[SLIDING] = keys.number("swa_rope_theta", 10000.0)
    rotary_factor = keys.number("partial_rotary_factor", 0.334)
    default = {
        kind: {"rope_theta": base, "partial_rotary_factor": rotary_factor} for kind, base in bases.items()
    }
    rope_keys = keys.but(rope_parameters=keys.get("rope_parameters") or default)
    ropes = ropes_by_kind(rope_keys, head_dim, FULL, SLIDING)
    window = sliding_window(keys, 129)
    if keys.get("sliding_window_size") is not None:
        window = keys.size("sliding_window_size") + 1
    kv_heads = 2 * keys.size("num_key_value_heads", 4)
    layers = tuple(
        LayerFacts(ropes[kind], window, kv_heads=kv_heads) if kind == SLIDING else LayerFacts(ropes[kind])
        for kind in kinds
    )
    facts = decoder(
        keys.defaults(rms_norm_eps=1e-5),
        head_dim=head_dim,
        layers=layers,
        qkv_bias=keys.flag("attention_bias"),
        v_dim=keys.size("v_head_dim", 128),
        attention_scales=(1.0, keys.number("attention_value_scale", 0.707)),
        sinks=True,
        unused=r"^model\.mtp\.",
    )
    moe = deepseek_experts(keys.but(n_shared_experts=None), "sigmoid")
    return add_experts(facts, moe, first_dense(keys, 1))


def gpt_oss(keys: ConfigReader) -> ArchFacts:
    keys.require("swiglu_limit", 7.0)
    rope = read_rope(keys, keys.size("head_dim", 64))
    windows = windows_by_kind(keys, sliding_window(keys, 128), full_every(keys, 2))
    return decoder(
        keys,
        head_dim=64,
        layers=tuple(LayerFacts(rope, window, moe=True) for window in windows),
        attention_bias=keys.flag("attention_bias", True),
        sinks=True,
        moe=read_experts(
            keys.defaults(num_local_experts=128, num_experts_per_tok=4),
            "intermediate_size",
            True,
            router_bias=True,
            expert_bias=True,
            activation="clamped_swiglu",
            names="gpt_oss",
        ),
    )
