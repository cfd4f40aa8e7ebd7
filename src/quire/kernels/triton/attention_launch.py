"""Launches of paged attention: tile shapes, and the number of split-KV shares for the device."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.triton import attention as kernels
from quire.kernels.triton import attention_fixed as fixed
from quire.kernels.triton.attention import AttentionSeqs, Cache, PartialAttention, PieceResults, Scores
from quire.kernels.triton.attention_pieces import cut_tiles
from quire.kernels.triton.launch import allocate_indices, launch, overlap
from quire.kernels.triton.split_kv import attend_split_kv

Int64s = NDArray[np.int64]

_LOG2_E = 1.4426950408889634
_DEFAULT_SMS = 4, 1 << 18
"""Multiprocessors and bytes of shared memory for the interpreter; enough for sequences to be split."""
_WIDE = 256
"""Head size above which a tile needs half of a multiprocessor's shared memory or more."""
FIXED_SPLIT = 256
"""Keys of the shortest split of the batch-invariant mode; a multiple of every `block_n`."""
_FIXED_BYTES = 256 << 20
"""Maximum bytes of the results of splits in the batch-invariant mode."""
_COUNTERS = 1 << 16
"""Minimum number of arrival counters. They are allocated once, not in a CUDA graph."""
MIN_KEYS = 64
"""Minimum keys per share (the keys of one program): with fewer, the merge costs more than is saved."""


MIN_PIECE, PIECE_GAIN = 512, 512
"""Minimum keys of a piece of a tile of a prompt, and minimum keys by which a tile that is cut is longer than
a piece: with fewer, the merge costs more than is saved."""
_STEP, _MOST_PIECES = 128, 32
"""Divisor of the keys of a piece, a multiple of every `block_n`, and maximum number of programs that share
keys, since one program merges the pieces of a tile."""


class AttentionShape(NamedTuple):
    """Tile shape of an attention kernel (rows `block_m`, keys `block_n`), and its compile options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1
    """Maximum programs per multiprocessor at once, for split-KV decode."""


class AttentionLayer(NamedTuple):
    """Attention parameters of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    """Sliding window; 0 for none."""
    softcap: float
    """Logit softcap; 0.0 for none."""
    k_scale: float
    v_scale: float
    chunked: bool = False
    """Whether the window begins at a multiple of its size, not at a distance from the query."""

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def few(self) -> int:
        """Number of queries that fill the smallest tile; sequences with at most this many use split-KV."""
        return max(1, 16 // self.group)


# Measured on an H200 with head size 128: benchmarks/kernel_attention.py.
def tile_shape(layer: AttentionLayer, dtype: torch.dtype, most_queries: int) -> AttentionShape:
    """Return the shape of the prefill kernel `tiles` if no sequence has more than `most_queries` queries."""
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
    """Return the shape of split-KV decode over a cache of `cache_dtype`, if each sequence has at most
    `most_queries` or `AttentionLayer.few` queries, whichever is more."""
    rows = max(16, triton.next_power_of_2(layer.group * most_queries))
    wide = layer.head_dim > 128
    if layer.head_dim > _WIDE:
        return AttentionShape(rows, 16, 4, 1 if dtype == torch.float32 else 2)
    if dtype == torch.float32:
        return AttentionShape(rows, 16 if wide else 32, 4, 1, 2)
    if wide or rows > 16:
        return AttentionShape(rows, 32, 4, 3, 2)
    return AttentionShape(rows, 64 if cache_dtype.itemsize == 1 else 32, 2, 3, 4)


def fixed_shape(layer: AttentionLayer, dtype: torch.dtype, most_queries: int) -> AttentionShape:
    """Return the shape of the kernels of the batch-invariant mode. Only the number of rows and warps depends
    on `most_queries`, which does not change results."""
    if dtype == torch.float32 or layer.head_dim > _WIDE:
        return tile_shape(layer, dtype, 0)
    wide, rows = layer.head_dim > 128, triton.next_power_of_2(layer.group)
    if most_queries * layer.group <= 64:
        return AttentionShape(max(64, rows), 64, 4, 2 if wide else 3, 2 - wide)
    return AttentionShape(max(128, rows), 64, 8, 2 if wide else 3, 2 - wide)


def most_splits(layer: AttentionLayer) -> int:
    """Return the maximum number of splits of a sequence's keys in the batch-invariant mode, with which a
    single sequence can fill the device."""
    return min(max(128 // layer.kv_heads, 16), 64)


def shares_of(layer: AttentionLayer, per_sm: int, num_seqs: int, num_sms: int) -> int:
    """Return the number of shares for each KV head; one program processes each share of a batch's keys.

    It is the number of programs that the device runs at once, or half of it if sequences of equal length then
    need no merge. It does not depend on sequence lengths, which change under a captured CUDA graph.
    """
    if num_sms // 2 <= num_seqs * layer.kv_heads <= per_sm // 2 * num_sms:
        per_sm //= 2
    return max(1, per_sm * num_sms // layer.kv_heads)


def programs_at_once(shape: AttentionShape, row_bytes: int, sm_bytes: int) -> int:
    """Return the number of programs that a multiprocessor with `sm_bytes` of shared memory runs at once, if
    the keys and values of a token need `row_bytes`."""
    return max(1, min(shape.per_sm, sm_bytes // (shape.num_stages * shape.block_n * row_bytes)))


def cache_of(k_cache: Tensor, v_cache: Tensor) -> Cache:
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (k_cache.shape[3], 1)
    return Cache(k_cache, v_cache, k_cache.stride(0), k_cache.stride(1))


class AttentionArgs(NamedTuple):
    """Output and inputs of the attention of one layer: `out` and `q` are [tokens, heads, head_dim], `sinks`
    and `alibi_slopes` are [heads]."""

    out: Tensor
    q: Tensor
    cache: Cache
    seqs: AttentionSeqs
    layer: AttentionLayer
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @property
    def constants(self) -> dict[str, int | bool]:
        return _constants(self.layer, self.cache.k.shape[1])

    def num_seqs(self, work: Tensor | None) -> int:
        """Return the number of sequences listed in `work`, or that of the batch if `work` is None."""
        return len(self.seqs.seq_lens) if work is None else len(work)


def attend_tiles(args: AttentionArgs, work: Tensor, reach: Tensor | None, shape: AttentionShape) -> None:
    """Launch the prefill kernel for the tiles in `work` [tiles, 2] (sequence, first query), or for the pieces
    of tiles in `work` [pieces, 6], see `attention_pieces.cut_tiles`."""
    out, q, cache, seqs, layer, sinks, alibi_slopes = args
    results = None
    if work.shape[1] > 2:
        num_results = 2 * programs_of(layer, q.device) * layer.kv_heads
        results = _piece_results(num_results, shape.block_m, layer.head_dim, q.device)
    launch(kernels.tiles, len(work), layer.kv_heads)(
        out, q, q.stride(0), cache, seqs, work, sinks, alibi_slopes, reach, _scores(layer), results,
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, num_warps=shape.num_warps, num_stages=shape.num_stages,
        **args.constants,
    )  # fmt: skip


def attend_fixed_tiles(
    args: AttentionArgs, work: Tensor, reach: Tensor | None, shape: AttentionShape
) -> None:
    """Compute the tiles in `work` [tiles, 2] (sequence, first query) in the batch-invariant mode."""
    out, q, cache, seqs, layer, sinks, alibi_slopes = args
    launch(fixed.fixed_tiles, len(work), layer.kv_heads)(
        out, q, q.stride(0), cache, seqs, work, sinks, alibi_slopes, reach, _scores(layer),
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, num_warps=shape.num_warps, num_stages=shape.num_stages,
        SPLIT=FIXED_SPLIT, MOST=most_splits(layer), **args.constants,
    )  # fmt: skip


def programs_of(layer: AttentionLayer, device: torch.device) -> int:
    """Return the number of programs that share the keys of the prompts' tiles of one KV head, or 0 if tiles
    are not cut: a window limits their keys."""
    return 0 if layer.window else min(max(1, sms(device)[0] // layer.kv_heads), _MOST_PIECES)


def cut_on_host(tiles: Int64s, num_keys: Int64s, programs: int) -> Int64s:
    """Return the pieces [pieces, 6] of the tiles [tiles, 2], which have `num_keys` [tiles] keys, or the tiles
    if none of them is cut. See `attention_pieces.cut_tiles`."""
    if not programs:
        return tiles
    size = max(-(-int(num_keys.sum()) // (programs * _STEP)) * _STEP, MIN_PIECE)
    counts = np.where(num_keys - PIECE_GAIN > size, -(-num_keys // size), 1)
    if counts.max() == 1:
        return tiles
    begins, num_results = np.cumsum(counts) - counts, np.where(counts > 1, counts, 0)
    results = np.cumsum(num_results) - num_results
    owner = np.repeat(np.arange(len(tiles)), counts)
    first = (np.arange(len(owner)) - begins[owner]) * size
    ends = np.where(counts[owner] > 1, first + size, 2**31 - 1)
    return np.column_stack((tiles[owner], first, ends, results[owner], counts[owner]))


def cut_on_device(
    query_starts: Tensor, seq_lens: Tensor, num_tokens: int, few: int, tile: int, programs: int
) -> tuple[Tensor, Tensor]:
    """Assign the sequences of a batch to attention kernels on the device, if the host does not know the
    lengths: return those with at most `few` queries, and the tiles of the others or, if `programs` share
    their keys, the pieces [pieces, 6]. Some of both are unused."""
    num_seqs, device = len(seq_lens), seq_lens.device
    num_pieces = num_tokens // tile + 1 + min(num_seqs - 1, num_tokens // (few + 1)) + programs
    selected = allocate_indices(num_seqs, dtype=torch.int32, device=device)
    work = allocate_indices(num_pieces, 6, dtype=torch.int32, device=device)
    launch(cut_tiles, 1)(
        selected, work, query_starts, seq_lens, num_seqs, num_tokens, num_pieces, programs,
        FEW=few, TILE=tile, STEP=_STEP, LEAST=MIN_PIECE, GAIN=PIECE_GAIN,
        SEQS=triton.next_power_of_2(num_seqs), num_warps=1,
    )  # fmt: skip
    return selected, work if programs else work[:, :2].contiguous()


def attend_shares(
    args: AttentionArgs,
    work: Tensor | None,
    shape: AttentionShape | None = None,
    shares: int | None = None,
    most_queries: int = 1,
) -> None:
    out, q, cache, seqs, layer, sinks, alibi_slopes = args
    num_seqs = args.num_seqs(work)
    shape = shape or share_shape(layer, q.dtype, cache.k.dtype, most_queries)
    if shares is None:
        num_sms, sm_bytes = sms(q.device)
        row_bytes = 2 * layer.head_dim * cache.k.element_size()
        shares = shares_of(layer, programs_at_once(shape, row_bytes, sm_bytes), num_seqs, num_sms)
    ahead = overlap(len(q), layer.heads * layer.head_dim)
    launch(attend_split_kv, layer.kv_heads, shares)(
        out, q, q.stride(0), cache, seqs, work, num_seqs, sinks, alibi_slopes, _scores(layer),
        _partial(layer.kv_heads * shares, shape.block_m, layer.head_dim, q.device),
        max(1, MIN_KEYS // shape.block_n), BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, OVERLAP=ahead,
        launch_pdl=ahead, num_warps=shape.num_warps, num_stages=shape.num_stages, **args.constants,
    )  # fmt: skip


def fits_fixed_shares(layer: AttentionLayer, shape: AttentionShape, num_seqs: int, most_queries: int) -> bool:
    """Whether `attend_fixed_shares` supports a batch: the queries of a sequence fit into a tile, and the
    results of all splits into `_FIXED_BYTES`."""
    rows = num_seqs * min(most_queries, 2) * layer.heads * most_queries * (most_splits(layer) + 2)
    return rows * layer.head_dim * 4 <= _FIXED_BYTES and layer.group * most_queries <= shape.block_m


def attend_fixed_shares(
    args: AttentionArgs, work: Tensor | None, shape: AttentionShape, most_queries: int
) -> None:
    """Compute attention of sequences with few queries in the batch-invariant mode. No sequence has more than
    `most_queries` queries, which fit into a tile. `work` lists the sequences; None selects all."""
    out, q, cache, seqs, layer, sinks, alibi_slopes = args
    num_seqs = args.num_seqs(work)
    kinds, rows, most = min(most_queries, 2), layer.group * most_queries, most_splits(layer)
    programs = max(1, shape.per_sm * sms(q.device)[0] // layer.kv_heads)
    items = layer.kv_heads * num_seqs * kinds
    sums = torch.empty(items * (most + 2) * rows * layer.head_dim, dtype=torch.float32, device=q.device)
    tops = torch.empty(items * (most + 2) * rows * 2, dtype=torch.float32, device=q.device)
    ahead = overlap(len(q), layer.heads * layer.head_dim)
    launch(fixed.fixed_shares, layer.kv_heads, programs)(
        out, q, q.stride(0), cache, seqs, work, num_seqs, sinks, alibi_slopes, _scores(layer),
        PartialAttention(sums, tops, _arrivals(max(items, _COUNTERS), q.device)), BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, SPLIT=FIXED_SPLIT, MOST=most, KINDS=kinds, ROWS=rows, OVERLAP=ahead,
        launch_pdl=ahead, num_warps=shape.num_warps, num_stages=shape.num_stages, **args.constants,
    )  # fmt: skip


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
        "CHUNKED": layer.chunked,
        "CAPPED": layer.softcap != 0,
        "DIM": layer.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(layer.head_dim)),
        "BLOCK_SIZE": block_size,
    }


def _partial(shares: int, rows: int, head_dim: int, device: torch.device) -> PartialAttention:
    sums = torch.empty(shares * 2 * rows * head_dim, dtype=torch.float32, device=device)
    tops = torch.empty(shares * 2 * rows * 2, dtype=torch.float32, device=device)
    return PartialAttention(sums, tops, _arrivals(shares, device))


def _piece_results(results: int, rows: int, head_dim: int, device: torch.device) -> PieceResults:
    sums = torch.empty(results * rows * head_dim, dtype=torch.float32, device=device)
    tops = torch.empty(results * rows * 2, dtype=torch.float32, device=device)
    return PieceResults(sums, tops, _arrivals(max(results, _COUNTERS), device))


@cache
def _arrivals(shares: int, device: torch.device) -> Tensor:
    return torch.zeros(shares, dtype=torch.int32, device=device)


@cache
def sms(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the bytes of shared memory of each."""
    if device.type != "cuda":
        return _DEFAULT_SMS
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor
