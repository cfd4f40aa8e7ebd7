"""Scores of a sparse attention indexer on a GPU: each program scores a tile of keys for one token."""
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch

_KEYS = 64
"""Keys per program."""


@triton.jit
def _score(
    out: tl.tensor, q: tl.tensor, weights: tl.tensor, keys: tl.tensor, tables: tl.tensor,
    table_stride: tl.tensor, rows: tl.tensor, seen: tl.tensor, width: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the scores of a tile of keys for one token. Grid: (tokens, tiles of keys)."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    key, count = first + tl.arange(0, BLOCK_N), tl.load(seen + token)
    exists = key < count
    scores = tl.full([BLOCK_N], float("-inf"), tl.float32)
    if first < count:
        table = tables + tl.load(rows + token) * table_stride
        blocks = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        dims, heads = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
        slots = (blocks * BLOCK_SIZE + key % BLOCK_SIZE) * DIM
        inside = dims[None, :] < DIM
        q_at = q + (token * HEADS + heads[:, None]) * DIM + dims[None, :]
        queries = tl.load(q_at, mask=(heads[:, None] < HEADS) & inside, other=0.0)
        k = tl.load(keys + slots[:, None] + dims[None, :], mask=exists[:, None] & inside, other=0.0)
        dots = tl.dot(k.to(queries.dtype), tl.trans(queries), input_precision="ieee")
        head_weights = tl.load(weights + token * HEADS + heads, mask=heads < HEADS, other=0.0)
        summed = tl.sum(tl.maximum(dots, 0.0) * head_weights[None, :], 1)
        scores = tl.where(exists, summed, float("-inf"))
    tl.store(out + token * width + key, scores, mask=key < width)


def scores(
    q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, rows: Tensor, seen: Tensor, width: int
) -> Tensor:
    """Return for each of T tokens the scores [T, width] of the keys at the first `width` positions of its
    sequence; the reference, with the arguments, is `reference` of `attention/sparse_indices.py`."""
    (num, heads, dim), block_size = q.shape, keys.shape[1]
    out = torch.empty(num, width, dtype=torch.float32, device=q.device)
    launch(_score, num, triton.cdiv(width, _KEYS))(
        out,
        q.contiguous(),
        weights.contiguous(),
        keys,
        tables,
        tables.stride(0),
        rows,
        seen,
        width,
        HEADS=heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=_KEYS,
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
    )
    return out
