"""Launches of MLA: tile shapes, and the number of split-KV shares for the device."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.kernels.triton import mla as kernels
from quire.kernels.triton.attention import AttentionSeqs, Scores
from quire.kernels.triton.attention_launch import AttentionShape, sms
from quire.kernels.triton.launch import launch, overlap
from quire.kernels.triton.mla import Latents, PartialMLA, Queries

_LOG2_E = 1.4426950408889634
_HOPPER_BYTES = 228 << 10
"""Shared memory of a Hopper multiprocessor."""
_MERGED = 2048
"""Number of partial sums that each warp of `merge` loads at once."""
GATHERED_KEYS = 16
"""Keys per tile of `gather`."""


class MLASizes(NamedTuple):
    """Sizes of one MLA layer: query heads, latent `rank`, and the unrotated (`nope`), rotated (`rope`) and
    value (`v`) parts of a head. `scale` is the factor of the attention scores."""

    heads: int
    rank: int
    nope: int
    rope: int
    v: int
    scale: float
    k_scale: float = 1.0
    """Scale by which the values of an 8-bit cache are divided."""


# Measured on an H200: benchmarks/kernel_mla.py.
def share_shape(rows: int, dtype: torch.dtype, sm_bytes: int) -> AttentionShape:
    """Return the shape of the decode kernel `shares` if a sequence has `rows` rows (queries times heads)."""
    if dtype == torch.float32:
        return AttentionShape(16, 16, 4, 1)
    if rows <= 16:
        return AttentionShape(16, 32, 4, 3, 2 if sm_bytes >= _HOPPER_BYTES else 1)
    if rows > 32 and sm_bytes >= _HOPPER_BYTES:
        return AttentionShape(64, 32, 8, 3)
    return AttentionShape(32, 32, 8, 2)


def tile_shape(dtype: torch.dtype, sm_bytes: int) -> AttentionShape:
    """Return the shape of the prefill kernel `tiles`."""
    if dtype == torch.float32:
        return AttentionShape(32, 32, 4, 1)
    return AttentionShape(128, 128, 8, 2) if sm_bytes >= _HOPPER_BYTES else AttentionShape(64, 32, 4, 2)


def latents_of(data: Tensor) -> Latents:
    assert data.stride(2) == 1
    return Latents(data, data.stride(0), data.stride(1))


def enter(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Latents,
    sizes: MLASizes,
    *,
    neighbours: bool,
) -> None:
    """Apply RoPE in place to the last dimensions of queries q [T, heads, nope + rope]. Normalize the latents
    and rotate the keys of kv [T, rank + rope], and write both to `slots` [T] of the cache. With `neighbours`,
    RoPE rotates adjacent values as pairs."""
    if not len(q):
        return
    ahead = overlap(len(q), sizes.heads * (sizes.nope + sizes.rope))
    kind = cache.data.dtype
    launch(kernels.enter, len(q), 2)(
        q, q.stride(0), kv, kv.stride(0), weight, eps, table, positions, slots, cache, sizes.k_scale,
        HEADS=sizes.heads, NOPE=sizes.nope, RANK=sizes.rank, ROPE=sizes.rope, NEIGHBOURS=neighbours,
        LIMIT=torch.finfo(kind).max if kind.itemsize == 1 else 0.0, BLOCK_SIZE=cache.data.shape[1],
        BLOCK_H=triton.next_power_of_2(sizes.heads),
        BLOCK_R=triton.next_power_of_2(sizes.rank), BLOCK_P=triton.next_power_of_2(sizes.rope // 2),
        OVERLAP=ahead, launch_pdl=ahead,
    )  # fmt: skip


def attend_shares(
    out: Tensor,
    latent: Tensor,
    rope: Tensor,
    cache: Latents,
    seqs: AttentionSeqs,
    sizes: MLASizes,
    most_queries: int,
    shape: AttentionShape | None = None,
    shares: int | None = None,
) -> None:
    """Write the attention of queries with the parts `latent` [T, heads, rank] and `rope` [T, heads, rope] to
    `out` [T, heads, rank]. No sequence has more than `most_queries` queries."""
    rows, num_seqs = most_queries * sizes.heads, len(seqs.seq_lens)
    num_sms, sm_bytes = sms(latent.device)
    shape = shape or share_shape(rows, latent.dtype, sm_bytes)
    groups = triton.cdiv(rows, shape.block_m)
    shares = shares or max(1, shape.per_sm * num_sms // groups)
    partial = _partial(groups * shares, shape.block_m, sizes.rank, num_seqs, latent.device)
    ahead, block_r = overlap(len(latent), 1), max(32, _pad(sizes.rank))
    launch(kernels.shares, groups, shares)(
        out, _queries(latent, rope), cache, seqs, num_seqs, _scores(sizes.scale, sizes.k_scale), partial, 1,
        HEADS=sizes.heads, RANK=sizes.rank, ROPE=sizes.rope, BLOCK_SIZE=cache.data.shape[1],
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_R=block_r, BLOCK_P=_pad(sizes.rope),
        OVERLAP=ahead, launch_pdl=ahead, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if shares > 1:
        # With few sequences, each sequence lies in many shares.
        at_once = min(max(8, triton.next_power_of_2(shares // num_seqs)), 256)
        num_warps = 4 if at_once < 64 else 8
        dims = min(_pad(sizes.rank), num_warps * _MERGED // at_once)
        launch(kernels.merge, num_seqs, rows, triton.cdiv(sizes.rank, dims))(
            out, seqs.query_starts, partial, shares, HEADS=sizes.heads, RANK=sizes.rank,
            BLOCK_M=shape.block_m, BLOCK_D=dims, SHARES=at_once, OVERLAP=ahead, launch_pdl=ahead,
            num_warps=num_warps,
        )  # fmt: skip


def attend_fixed(
    out: Tensor,
    latent: Tensor,
    rope: Tensor,
    cache: Latents,
    seqs: AttentionSeqs,
    sizes: MLASizes,
    most_queries: int,
) -> None:
    """Compute `attend_shares` in the batch-invariant mode: with one tile shape and without splits."""
    rows, sm_bytes = most_queries * latent.shape[1], sms(latent.device)[1]
    shape = share_shape(64, latent.dtype, sm_bytes)
    launch(kernels.fixed_rows, triton.cdiv(rows, shape.block_m), len(seqs.seq_lens))(
        out, _queries(latent, rope), cache, seqs, _scores(sizes.scale, sizes.k_scale),
        HEADS=latent.shape[1], RANK=sizes.rank, ROPE=sizes.rope, BLOCK_SIZE=cache.data.shape[1],
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_R=max(32, _pad(sizes.rank)),
        BLOCK_P=_pad(sizes.rope), num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


def gather(out: Tensor, cache: Latents, seqs: AttentionSeqs, work: Tensor, k_scale: float) -> None:
    """Copy the cached latents of sequences from their blocks to `out` [keys, rank + rope], one sequence after
    the other. `work` lists the tiles of keys as in the kernel `mla.gather`."""
    launch(kernels.gather, len(work))(
        out, cache, seqs, work, k_scale, WIDTH=out.shape[1], BLOCK_SIZE=cache.data.shape[1],
        BLOCK_N=GATHERED_KEYS, BLOCK_W=_pad(out.shape[1]),
    )  # fmt: skip


def attend_tiles(
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    turned: Tensor,
    seqs: AttentionSeqs,
    work: Tensor,
    sizes: MLASizes,
    shape: AttentionShape,
) -> None:
    """Write the attention of the queries q [T, heads, nope + rope] to `out`, for some of the layer's heads:
    over expanded keys and values `kv` [keys, heads, nope + v] and rotated keys `turned` [keys, rope]. `work`
    lists the tiles of queries as in the kernel `mla.tiles`."""
    launch(kernels.tiles, len(work), kv.shape[1])(
        out, out.stride(0), q, q.stride(0), kv, kv.stride(0), turned, turned.stride(0), seqs, work,
        _scores(sizes.scale), NOPE=sizes.nope, ROPE=sizes.rope, V=sizes.v, BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, BLOCK_K=_pad(sizes.nope), BLOCK_P=_pad(sizes.rope), BLOCK_V=_pad(sizes.v),
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


def _pad(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _queries(latent: Tensor, rope: Tensor) -> Queries:
    assert latent.stride(2) == rope.stride(2) == 1
    token, head, _ = latent.stride()
    return Queries(latent, token, head, rope, rope.stride(0), rope.stride(1))


@cache
def _scores(scale: float, k_scale: float = 1.0) -> Scores:
    return Scores(scale * k_scale * _LOG2_E, 0.0, k_scale)


def _partial(pieces: int, rows: int, rank: int, num_seqs: int, device: torch.device) -> PartialMLA:
    sums = torch.empty(pieces * 2 * rows * rank, dtype=torch.float32, device=device)
    tops = torch.empty(pieces * 2 * rows * 2, dtype=torch.float32, device=device)
    return PartialMLA(sums, tops, torch.empty(num_seqs, 2, dtype=torch.int32, device=device))
