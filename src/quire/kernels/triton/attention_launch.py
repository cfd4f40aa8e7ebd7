"""Launching paged attention: the shape of tiles by what is computed, the number of shares by the device."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.kernels.triton import attention as kernels
from quire.kernels.triton.attention import AttentionSeqs, Cache, PartialAttention, Scores
from quire.kernels.triton.launch import launch, overlap

_LOG2_E = 1.4426950408889634
_DEFAULT_SMS = 4, 1 << 18
"""Where there is no GPU, in the interpreter: enough for sequences to be cut."""
_WIDE = 256
"""Numbers of a head, of which a tile takes half of a multiprocessor's own memory."""
MIN_KEYS = 64
"""No share has fewer keys: to merge costs more than it brings."""


class AttentionShape(NamedTuple):
    """How a kernel is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1
    """Programs that a multiprocessor takes at once, where that counts."""


class AttentionLayer(NamedTuple):
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    """0: none"""
    softcap: float
    """0.0: none"""
    k_scale: float
    v_scale: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def few(self) -> int:
        """How many queries of a sequence fill the smallest tile: up to here its keys are cut instead."""
        return max(1, 16 // self.group)


# Measured on an H200 with head size 128: benchmarks/kernel_attention.py.
def tile_shape(layer: AttentionLayer, dtype: torch.dtype, most_queries: int) -> AttentionShape:
    """For `tiles`, where no sequence has more than `most_queries`."""
    wide = layer.head_dim > 128
    rows = triton.next_power_of_2(layer.group)
    if layer.head_dim > _WIDE:
        return AttentionShape(max(16 if dtype == torch.float32 else 64, rows), 16, 8, 1)
    if dtype == torch.float32:
        return AttentionShape(max(32, rows), 16 if wide else 32, 8, 1)
    if most_queries * layer.group <= 64:
        return AttentionShape(max(64, rows), 32 if wide else 64, 4, 2 if wide else 3)
    return AttentionShape(max(128, rows), 64, 8, 2 if wide else 3)


def share_shape(
    layer: AttentionLayer, dtype: torch.dtype, cache_dtype: torch.dtype, most_queries: int = 1
) -> AttentionShape:
    """For `shares` over a cache of the second type, where no sequence has more than `most_queries`, or than
    fill the smallest tile."""
    rows = max(16, triton.next_power_of_2(layer.group * most_queries))
    wide = layer.head_dim > 128
    if layer.head_dim > _WIDE:
        return AttentionShape(rows, 16, 4, 1 if dtype == torch.float32 else 2)
    if dtype == torch.float32:
        return AttentionShape(rows, 16 if wide else 32, 4, 1, 2)
    if wide or rows > 16:
        return AttentionShape(rows, 32, 4, 3, 2)
    return AttentionShape(rows, 64 if cache_dtype.itemsize == 1 else 32, 2, 3, 4)


def shares_of(layer: AttentionLayer, per_sm: int, num_seqs: int, num_sms: int) -> int:
    """Into how many shares the keys of a batch are cut for each key head.

    As many as the device takes at once, or half of that where sequences of equal lengths then need no merge.
    Not by the lengths, which change under a captured graph.
    """
    if num_sms // 2 <= num_seqs * layer.kv_heads <= per_sm // 2 * num_sms:
        per_sm //= 2
    return max(1, per_sm * num_sms // layer.kv_heads)


def programs_at_once(shape: AttentionShape, row_bytes: int, sm_bytes: int) -> int:
    """On one multiprocessor, where keys and values of a token take so many bytes of its own memory."""
    return max(1, min(shape.per_sm, sm_bytes // (shape.num_stages * shape.block_n * row_bytes)))


def cache_of(k_cache: Tensor, v_cache: Tensor) -> Cache:
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (k_cache.shape[3], 1)
    return Cache(k_cache, v_cache, k_cache.stride(0), k_cache.stride(1))


def attend_tiles(
    out: Tensor,
    q: Tensor,
    cache: Cache,
    seqs: AttentionSeqs,
    work: Tensor,
    layer: AttentionLayer,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    reach: Tensor | None,
    shape: AttentionShape,
) -> None:
    launch(kernels.tiles, len(work), layer.kv_heads)(
        out,
        q,
        q.stride(0),
        cache,
        seqs,
        work,
        sinks,
        alibi_slopes,
        reach,
        _scores(layer),
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **_constants(layer, cache.k.shape[1]),
    )


def attend_shares(
    out: Tensor,
    q: Tensor,
    cache: Cache,
    seqs: AttentionSeqs,
    work: Tensor | None,
    layer: AttentionLayer,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    shape: AttentionShape | None = None,
    shares: int | None = None,
    most_queries: int = 1,
) -> None:
    num_seqs = len(seqs.seq_lens) if work is None else len(work)
    shape = shape or share_shape(layer, q.dtype, cache.k.dtype, most_queries)
    if shares is None:
        num_sms, sm_bytes = sms(q.device)
        row_bytes = 2 * layer.head_dim * cache.k.element_size()
        shares = shares_of(layer, programs_at_once(shape, row_bytes, sm_bytes), num_seqs, num_sms)
    ahead = overlap(len(q), layer.heads * layer.head_dim)
    launch(kernels.shares, layer.kv_heads, shares)(
        out,
        q,
        q.stride(0),
        cache,
        seqs,
        work,
        num_seqs,
        sinks,
        alibi_slopes,
        _scores(layer),
        _partial(layer.kv_heads * shares, shape.block_m, layer.head_dim, q.device),
        max(1, MIN_KEYS // shape.block_n),
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        OVERLAP=ahead,
        launch_pdl=ahead,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **_constants(layer, cache.k.shape[1]),
    )


@cache
def _scores(layer: AttentionLayer) -> Scores:
    scale = layer.scale * layer.k_scale * _LOG2_E
    if layer.softcap:
        return Scores(2 * scale / layer.softcap, layer.softcap * _LOG2_E, layer.v_scale)
    return Scores(scale, 0.0, layer.v_scale)


@cache
def _constants(layer: AttentionLayer, block_size: int) -> dict[str, int | bool]:
    return {
        "GROUP": layer.group,
        "WINDOW": layer.window,
        "CAPPED": layer.softcap != 0,
        "DIM": layer.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(layer.head_dim)),
        "BLOCK_SIZE": block_size,
    }


def _partial(shares: int, rows: int, head_dim: int, device: torch.device) -> PartialAttention:
    sums = torch.empty(shares * 2 * rows * head_dim, dtype=torch.float32, device=device)
    tops = torch.empty(shares * 2 * rows * 2, dtype=torch.float32, device=device)
    return PartialAttention(sums, tops, _arrivals(shares, device))


@cache
def _arrivals(shares: int, device: torch.device) -> Tensor:
    return torch.zeros(shares, dtype=torch.int32, device=device)


@cache
def sms(device: torch.device) -> tuple[int, int]:
    """How many multiprocessors there are, and the bytes of memory that each has of its own."""
    if device.type != "cuda":
        return _DEFAULT_SMS
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor
