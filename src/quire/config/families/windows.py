"""Decoders that look back through windows in most of their layers."""

import math
from typing import Any

from quire.config.facts import AltUpFacts, ArchFacts, LayerFacts, MoeFacts, RopeFacts, Routing
from quire.config.families.decoder import (
    activation_of,
    decoder,
    layer_kinds,
    ropes_by_kind,
    sliding_window,
    windows_by_kind,
)
from quire.config.families.dense import with_defaults
from quire.config.keys import Keys
from quire.config.rope import max_len_of, read_rope

_KINDS = ("full_attention", "sliding_attention")


def gemma2(keys: Keys) -> ArchFacts:
    count = keys.size("num_hidden_layers")
    alternating = [_KINDS[(layer + 1) % 2] for layer in range(count)]
    return decoder(
        keys,
        head_dim=256,
        windows=windows_by_kind(keys, sliding_window(keys), alternating),
        **_gemma(keys),
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
    )


def vaultgemma(keys: Keys) -> ArchFacts:
    """Gemma 2 without norms behind each half."""
    return gemma2(with_defaults(keys, attn_logit_softcapping=50.0, final_logit_softcapping=30.0))


def gemma3(keys: Keys) -> ArchFacts:
    head_dim, count = keys.size("head_dim", 256), keys.size("num_hidden_layers")
    every = keys.size("sliding_window_pattern", 6)
    kinds = layer_kinds(keys, *_KINDS, default=[_KINDS[bool((layer + 1) % every)] for layer in range(count)])
    ropes = _local_ropes(keys, head_dim)
    window = sliding_window(keys)
    if window is not None and keys.get("use_bidirectional_attention") is True:
        window = window // 2 + 1  # half of it lies ahead
    windows = {"full_attention": None, "sliding_attention": window}
    return decoder(
        keys,
        head_dim=256,
        layers=tuple(LayerFacts(ropes[kind], windows[kind]) for kind in kinds),
        **_gemma(keys),
        qk_norm="head",
        max_len=max_len_of(keys),  # a stretched rotation counted in
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
    )


def gemma3n(keys: Keys) -> ArchFacts:
    """Layers of the last ones see the keys and values of the last one of their kind before them."""
    head_dim, count = keys.size("head_dim", 256), keys.size("num_hidden_layers")
    kinds = layer_kinds(keys, *_KINDS, default=[_KINDS[bool((layer + 1) % 5)] for layer in range(count)])
    windows = {"full_attention": None, "sliding_attention": sliding_window(keys, 512)}
    ropes = _local_ropes(keys, head_dim)
    shared = keys.get("num_kv_shared_layers")
    first = count - (15 if shared is None else shared)
    first = first if first > 0 else count
    last = {kind: max((at for at in range(first) if kinds[at] == kind), default=None) for kind in _KINDS}
    if any(last[kind] is None for kind in kinds[first:]):
        raise keys.wrong("num_kv_shared_layers", "a number that leaves a layer of each kind in front")
    sparse = keys.get("activation_sparsity_pattern")
    sparse = [0.95 * (at < 10 < count) for at in range(count)] if sparse is None else sparse
    layers = tuple(
        LayerFacts(
            ropes[kind],
            windows[kind],
            keys_of=last[kind] if at >= first else None,
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
        head_dim=256,
        layers=layers,
        **_gemma(keys) | {"norm": "rms", "attention_scale": 1.0},
        qk_norm="head",
        max_len=max_len_of(keys),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
        altup=AltUpFacts(
            inputs=keys.size("altup_num_inputs", 4),
            active=keys.get("altup_active_idx") or 0,
            is_scaled=keys.flag("altup_correct_scale", True),
            rank=keys.size("laurel_rank", 64),
            per_layer=keys.size("hidden_size_per_layer_input", 256),
            vocab=keys.size("vocab_size_per_layer_input", 262144),
        ),
        unused=_not_read(range(first, count)),
    )


def _not_read(shared: range) -> str:
    """What checkpoints have of layers that see the keys of others, and the towers."""
    numbers = "|".join(map(str, shared)) or "none"
    keys = rf"layers\.({numbers})\.self_attn\.[kv]_(proj|norm)\."
    return rf"{keys}|(vision_tower|audio_tower|embed_vision|embed_audio)\."


def _local_ropes(keys: Keys, head_dim: int) -> dict[str, RopeFacts]:
    """Layers with windows turn by a base of their own."""
    ropes = ropes_by_kind(keys, head_dim, *_KINDS)
    if keys.get("rope_local_base_freq") is not None:
        local = {"rope_type": "default", "rope_theta": keys.number("rope_local_base_freq")}
        ropes["sliding_attention"] = read_rope(keys.but(rope_parameters=local, rope_scaling=None), head_dim)
    return ropes


def _gemma(keys: Keys) -> dict[str, Any]:
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


def gpt_oss(keys: Keys) -> ArchFacts:
    head_dim, count = keys.size("head_dim", 64), keys.size("num_hidden_layers")
    alternating = [_KINDS[(layer + 1) % 2] for layer in range(count)]
    rope = read_rope(keys, head_dim)
    windows = windows_by_kind(keys, sliding_window(keys, 128), alternating)
    biased = keys.flag("attention_bias", True)
    return decoder(
        keys,
        head_dim=64,
        layers=tuple(LayerFacts(rope, window, moe=True) for window in windows),
        qkv_bias=biased,
        out_bias=biased,
        sinks=True,
        moe=MoeFacts(
            experts=keys.size("num_local_experts", 128),
            intermediate=keys.size("intermediate_size"),
            routing=Routing(keys.size("num_experts_per_tok", 4), renormalized=True),
            router_bias=True,
            expert_bias=True,
            activation="clamped_swiglu",
            names="gpt_oss",
        ),
    )
