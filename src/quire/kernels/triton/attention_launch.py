"""Launching paged attention: the shape of tiles by what is computed, the number of ranges by the device."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.kernels.triton import attention as kernels
from quire.kernels.triton.attention import Cache, Partial, Scores, Seqs
from quire.kernels.triton.launch import overlap

_LOG2_E = 1.4426950408889634
_MAX_GROUPS = 1 << 14
"""(sequence, key head) pairs beyond which nothing is cut into ranges."""
_DEFAULT_SMS = 132
MIN_KEYS, FEW_KEYS = 64, 640
"""No range has fewer keys than the first, nor than the second where there is a pair for each multiprocessor:
to merge ranges costs more than it brings there."""
MAX_KEYS = 2048
"""A range with more keys than this is cut further even where the device is busy without it: one long sequence
among short ones would keep everybody waiting."""
_MAX_RANGES = 3072
"""Those that turn out empty take time too: together 2 us at 32 sequences on an H200, 5 us at 128."""


class Shape(NamedTuple):
    """How a kernel is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Layer(NamedTuple):
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


# Measured on an H200 with head size 128: attention_speed.py among the tests of these kernels.
def tile_shape(layer: Layer, dtype: torch.dtype, most_queries: int) -> Shape:
    """For `tiles`, where no sequence has more than `most_queries`."""
    wide = layer.head_dim > 128
    rows = triton.next_power_of_2(layer.group)
    if dtype == torch.float32:
        return Shape(max(32, rows), 16 if wide else 32, 8, 1)
    if most_queries * layer.group <= 64:
        return Shape(max(64, rows), 32 if wide else 64, 4, 2 if wide else 3)
    return Shape(max(128, rows), 64, 8, 2 if wide else 3)


def range_shape(layer: Layer, dtype: torch.dtype, groups: int, num_sms: int) -> Shape:
    """For `ranges`, with so many (sequence, key head) pairs."""
    rows = max(16, triton.next_power_of_2(layer.group))
    wide = layer.head_dim > 128
    if dtype == torch.float32:
        return Shape(rows, 16 if wide else 32, 4, 1)
    if wide or rows > 16:
        return Shape(rows, 32, 4, 3)
    if groups >= 3 * num_sms:
        return Shape(rows, 64, 4, 3)
    return Shape(rows, 32, 4 if num_sms // 4 <= groups <= num_sms // 2 else 2, 3)


class Ranges(NamedTuple):
    fair: int
    """Into how many ranges the keys of a sequence are cut to keep the device busy."""
    most: int
    """Into how many those of a long one are."""
    least_keys: int
    """That a range has."""


def ranges_of(groups: int, max_keys: int, num_sms: int) -> Ranges:
    """For so many (sequence, key head) pairs; not by their lengths, which change under a captured graph."""
    if groups > _MAX_GROUPS:
        return Ranges(1, 1, MIN_KEYS)
    if groups >= 3 * num_sms:
        fair, least_keys = 1, MIN_KEYS
    elif groups >= num_sms:
        fair, least_keys = 4, FEW_KEYS
    elif groups >= num_sms // 4:
        fair, least_keys = 4 * num_sms // groups, MIN_KEYS
    else:
        fair, least_keys = 5 * num_sms // 2 // groups, MIN_KEYS
    fair = max(1, min(fair, -(-max_keys // least_keys)))
    if max_keys <= 2 * MAX_KEYS:
        return Ranges(fair, fair, least_keys)
    return Ranges(fair, max(fair, min(-(-max_keys // MAX_KEYS), _MAX_RANGES // groups)), least_keys)


def cache_of(k_cache: Tensor, v_cache: Tensor) -> Cache:
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (k_cache.shape[3], 1)
    return Cache(k_cache, v_cache, k_cache.stride(0), k_cache.stride(1))


def attend_tiles(
    out: Tensor,
    q: Tensor,
    cache: Cache,
    seqs: Seqs,
    work: Tensor,
    layer: Layer,
    sinks: Tensor | None,
    shape: Shape,
) -> None:
    kernels.tiles[(len(work), layer.kv_heads)](
        out,
        q,
        q.stride(0),
        cache,
        seqs,
        work,
        sinks,
        _scores(layer),
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **_constants(layer, cache.k.shape[1]),
    )


def attend_ranges(
    out: Tensor,
    q: Tensor,
    cache: Cache,
    seqs: Seqs,
    work: Tensor | None,
    layer: Layer,
    sinks: Tensor | None,
    ranges: Ranges | None = None,
    shape: Shape | None = None,
) -> None:
    num_seqs = len(seqs.seq_lens) if work is None else len(work)
    groups = num_seqs * layer.kv_heads
    max_keys = seqs.block_tables.shape[1] * cache.k.shape[1]
    if layer.window:
        max_keys = min(max_keys, layer.window + layer.few)
    ranges = ranges or ranges_of(groups, max_keys, _num_sms(q.device))
    shape = shape or range_shape(layer, q.dtype, groups, _num_sms(q.device))
    ahead = overlap(len(q), layer.heads * layer.head_dim)
    kernels.ranges[(layer.kv_heads, num_seqs, ranges.most)](
        out,
        q,
        q.stride(0),
        cache,
        seqs,
        work,
        sinks,
        _scores(layer),
        _partial(groups, ranges.most, shape.block_m, layer.head_dim, q.device),
        ranges.fair,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        MIN_KEYS=ranges.least_keys,
        MAX_KEYS=MAX_KEYS,
        OVERLAP=ahead,
        launch_pdl=ahead,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **_constants(layer, cache.k.shape[1]),
    )


@cache
def _scores(layer: Layer) -> Scores:
    scale = layer.scale * layer.k_scale * _LOG2_E
    if layer.softcap:
        return Scores(2 * scale / layer.softcap, layer.softcap * _LOG2_E, layer.v_scale)
    return Scores(scale, 0.0, layer.v_scale)


@cache
def _constants(layer: Layer, block_size: int) -> dict[str, int | bool]:
    return {
        "GROUP": layer.group,
        "WINDOW": layer.window,
        "CAPPED": layer.softcap != 0,
        "DIM": layer.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(layer.head_dim)),
        "BLOCK_SIZE": block_size,
    }


def _partial(groups: int, ranges: int, rows: int, head_dim: int, device: torch.device) -> Partial | None:
    if ranges == 1:
        return None
    sums = torch.empty(groups * ranges * rows * head_dim, dtype=torch.float32, device=device)
    tops = torch.empty(groups * ranges * rows * 2, dtype=torch.float32, device=device)
    return Partial(sums, tops, _arrivals(device))


@cache
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(_MAX_GROUPS, dtype=torch.int32, device=device)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
