"""Reading Gemma from GGUF headers."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from quire.checkpoint.facts import AltUpFacts, ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.families.decoder import Windows, kv_sharing_targets, unused_kv_pattern
from quire.checkpoint.families.gguf import (
    gguf_decoder,
    optional_size,
    per_layer,
    read_gguf_experts,
    read_windows,
)
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import FALLBACK_MAX_LEN, read_gguf_rope
from quire.errors import ConfigError


def gemma(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Gemma 1."""
    return gguf_decoder(file, arch, **_gemma_facts(arch, largest=0))


def gemma2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(
        file,
        arch,
        windows=read_windows(arch, every=2, window=arch.size("attention.sliding_window", 4096)),
        attention_softcap=arch.number("attn_logit_softcapping", 50.0),
        logit_softcap=arch.number("final_logit_softcapping", 30.0),
        **_gemma_facts(arch, largest=46),
    )


def gemma3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Gemma 3. Full-attention layers and window layers have different ropes, and only the former rope is
    scaled; the context length includes the scaling."""
    head_dim = arch.size("attention.key_length")
    rope = read_gguf_rope(file, arch, head_dim)
    local_rope = _local_rope(rope, arch)
    windows = read_windows(arch, every=6, window=optional_size(arch, "attention.sliding_window"))
    return gguf_decoder(
        file,
        arch,
        layers=tuple(LayerFacts(local_rope if window else rope, window) for window in windows),
        qk_norm="head",
        logit_softcap=arch.optional_number("final_logit_softcapping"),
        max_len=arch.size("context_length", FALLBACK_MAX_LEN),
        **_gemma_facts(arch, largest=62),
    )


def _local_rope(rope: RopeFacts, arch: ConfigReader) -> RopeFacts:
    """Return the rotary embedding of window layers, which has no scaling."""
    theta = arch.number("rope.freq_base_swa", 10000.0)
    return replace(rope, kind="default", factor=1.0, factors=(), theta=theta)


def _gemma_facts(arch: ConfigReader, largest: int) -> dict[str, Any]:
    """Return fields of ArchFacts for Gemma; norm weights in GGUF files include the added 1. Attention scores
    are divided by the root of the head size, in the model with `largest` layers by the root of hidden size /
    heads (the header has no key for this)."""
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    is_largest = arch.size("block_count") == largest
    width = hidden // heads if is_largest else arch.size("attention.key_length", hidden // heads)
    return {"activation": "gelu_tanh", "attention_scale": width**-0.5, "embed_scale": math.sqrt(hidden)}


def gemma3n(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Gemma 3n. The last layers share the KV cache of the last earlier layer of their type."""
    rope = read_gguf_rope(file, arch, arch.size("attention.key_length"))
    local_rope = _local_rope(rope, arch)
    windows = read_windows(arch, every=5, window=arch.size("attention.sliding_window"))
    shared = _kv_sharing_targets(arch, windows)
    stored = arch.get("activation_sparsity_scale")
    deviations = np.asarray([-math.inf] * len(windows) if stored is None else stored)
    if deviations.shape != (len(windows),) or deviations.dtype.kind != "f":
        raise arch.wrong("activation_sparsity_scale", f"{len(windows)} numbers")
    layers = tuple(
        LayerFacts(
            local_rope if window else rope,
            window,
            kv_sharing_target=shared[at],
            sparsity=0.0 if deviations[at] == -math.inf else NormalDist().cdf(float(deviations[at])),
        )
        for at, window in enumerate(windows)
    )
    inner = per_layer(arch, "feed_forward_length")
    if len({*inner}) != 1:
        raise arch.wrong("feed_forward_length", "one number for all layers")
    per_token = _stored_shape(file, "per_layer_token_embd.weight")
    altup = AltUpFacts(
        inputs=arch.size("altup.num_inputs"),
        active=arch.count("altup.active_idx"),
        is_scaled=True,
        rank=_stored_shape(file, "blk.0.laurel_l.weight")[0],
        per_layer=arch.size("embedding_length_per_layer_input"),
        vocab=per_token[0],
    )
    arch = arch.but(feed_forward_length=inner[0])
    return gguf_decoder(file, arch, layers=layers, altup=altup, **_gemma3n_facts(arch, shared))


def gemma4(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Gemma 4. Full-attention layers have another head size. Layers without value weights use keys as
    values. The last layers may share the KV cache of earlier layers."""
    full_dim, local_dim = arch.size("attention.key_length"), arch.size("attention.key_length_swa")
    rope = read_gguf_rope(file, arch, full_dim)
    # Large factors stand for frequencies that do not rotate.
    factors = tuple(math.inf if factor > 1e20 else factor for factor in rope.factors)
    rope = replace(rope, factors=factors)
    local_rope = _local_rope(replace(rope, dim=arch.size("rope.dimension_count_swa", local_dim)), arch)
    windows = read_windows(arch, every=6, window=arch.size("attention.sliding_window"))
    shared = _kv_sharing_targets(arch, windows)
    kv_heads, inner = per_layer(arch, "attention.head_count_kv"), per_layer(arch, "feed_forward_length")
    has_experts = "blk.0.ffn_gate_inp.weight" in file.tensors
    layers = tuple(
        LayerFacts(
            local_rope if window else rope,
            window,
            moe=has_experts,
            kv_sharing_target=shared[at],
            head_dim=local_dim if window else full_dim,
            kv_heads=kv_heads[at],
            intermediate=inner[at],
            keys_are_values=shared[at] is None and f"blk.{at}.attn_v.weight" not in file.tensors,
        )
        for at, window in enumerate(windows)
    )
    width, altup, moe = optional_size(arch, "embedding_length_per_layer_input"), None, None
    if width:
        vocab = _stored_shape(file, "per_layer_token_embd.weight")[0]
        altup = AltUpFacts(inputs=1, active=0, is_scaled=False, rank=0, per_layer=width, vocab=vocab)
    if has_experts:
        width = arch.size("expert_feed_forward_length")
        moe = read_gguf_experts(arch, width, shared_intermediate=inner[0], names="apart_gemma4")
    sizes = {"feed_forward_length": inner[0], "attention.head_count_kv": max(kv_heads)}
    local = {"attention.key_length": local_dim, "attention.value_length": local_dim}
    arch = arch.but(**sizes, **local)
    return gguf_decoder(file, arch, layers=layers, altup=altup, moe=moe, **_gemma3n_facts(arch, shared))


def _kv_sharing_targets(arch: ConfigReader, windows: Windows) -> list[int | None]:
    key = "attention.shared_kv_layers"
    return kv_sharing_targets(arch, key, windows, arch.count(key))


def _stored_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{file.path}: the tensor {name} is missing; convert the model again")
    return tensor.shape


def _gemma3n_facts(arch: ConfigReader, shared: list[int | None]) -> dict[str, Any]:
    """Return fields of ArchFacts for Gemma 3n and later: norms of queries and keys, and unscaled attention.
    Layers that use the KV cache of another layer (`shared`) do not load their key and value weights."""
    return {
        "activation": "gelu_tanh",
        "attention_scale": 1.0,
        "embed_scale": math.sqrt(arch.size("embedding_length")),
        "qk_norm": "head",
        "logit_softcap": arch.optional_number("final_logit_softcapping"),
        "max_len": arch.size("context_length", FALLBACK_MAX_LEN),
        "unused": unused_kv_pattern(shared),
    }
