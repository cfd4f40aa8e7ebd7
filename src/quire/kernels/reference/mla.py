"""MLA projections and cache writes in C (`csrc/mla.c`). The reference in torch is `attention/mla.py`."""

import torch
from torch import Tensor

from quire.kernels.cpu.attention import CACHE_DTYPES
from quire.kernels.cpu.linear import FORMS, PANEL, Matrix
from quire.kernels.cpu.native import Kernel

_TASK_ROWS = 64
"""Rows per task, equal to that in mla.c."""
_MAX_HEAD_DIM = 1024
"""Maximum head size, equal to that in heads.h."""
_MAX_RANK = 4096
"""Maximum latent rank, equal to that in mla.c."""
_enter = Kernel(
    "quire_latent_enter",
    "q kv norm table positions slots cache",
    "num_tokens q_stride kv_stride heads nope_dim rope_dim rank neighbours bf16 kept",
    "eps scale",
)
_HEADS = "num_tokens x_stride heads nope_dim rope_dim v_dim rank bf16 scratch_bytes"
_absorb = Kernel("quire_latent_absorb", "out x weight scratch", _HEADS)
_release = Kernel("quire_latent_release", "out x weight scratch", _HEADS)


def rotate_and_write_latents(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    *,
    norm: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    neighbours: bool,
    scale: float = 1.0,
) -> None:
    """Apply RoPE in place to the last rope_dim values of the queries q [T, heads, nope_dim + rope_dim].
    Normalize the latents and rotate the keys of kv [T, rank + rope_dim], and write both to `slots` [T] of the
    cache [num_blocks, block_size, rank + rope_dim]. With `neighbours`, RoPE rotates adjacent values as pairs,
    not the left half with the right half. Values of an 8-bit cache are divided by `scale`."""
    (num_tokens, heads, query_dim), rope_dim = q.shape, table.shape[1]
    assert q.dtype in FORMS and {q.dtype} == {x.dtype for x in (kv, norm, table)}
    assert q.stride()[1:] == (query_dim, 1) and kv.stride(1) == 1
    assert cache.dtype in CACHE_DTYPES and cache.is_contiguous() and table.is_contiguous()
    assert rope_dim <= _MAX_HEAD_DIM and cache.shape[2] - rope_dim <= _MAX_RANK
    _enter(
        (q, kv, norm, table, positions, slots, cache),
        num_tokens,
        q.stride(0),
        kv.stride(0),
        heads,
        query_dim - rope_dim,
        rope_dim,
        cache.shape[2] - rope_dim,
        neighbours,
        q.dtype == torch.bfloat16,
        CACHE_DTYPES[cache.dtype],
        eps,
        scale,
    )


def absorb(q: Tensor, weight: Tensor, *, rope_dim: int) -> Tensor:
    """Project the queries [T, heads, nope_dim + rope_dim] to the latent space [T, heads, rank + rope_dim], by
    `weight` [heads, nope_dim + v_dim, rank]. The last rope_dim values are copied. A row is bitwise equal
    alone and in any batch, with any number of threads."""
    num_tokens, heads, query_dim = q.shape
    nope_dim = query_dim - rope_dim
    assert q.dtype in FORMS and q.dtype == weight.dtype and q.stride()[1:] == (query_dim, 1)
    out = q.new_empty(num_tokens, heads, weight.shape[2] + rope_dim)
    _absorb(
        (out, q, weight, None),
        num_tokens,
        q.stride(0),
        heads,
        nope_dim,
        rope_dim,
        weight.shape[1] - nope_dim,
        weight.shape[2],
        q.dtype == torch.bfloat16,
        0,
    )
    return out


def release(latents: Tensor, weight: Tensor, *, v_dim: int) -> Tensor:
    """Project the attention outputs [T, heads, rank + rope_dim] in the latent space to values [T, heads,
    v_dim], by the `weight` of `absorb`; the last rope_dim are unused. A row is bitwise equal in any batch."""
    num_tokens, heads, width = latents.shape
    _, kv_dim, rank = weight.shape
    assert latents.dtype in FORMS and latents.dtype == weight.dtype and latents.is_contiguous()
    out = latents.new_empty(num_tokens, heads, v_dim)
    num_rows = min(num_tokens, _TASK_ROWS) + PANEL - 1
    scratch_bytes = num_rows * Matrix.plain(weight[0]).prepared_bytes
    scratch = torch.empty(torch.get_num_threads() * scratch_bytes, dtype=torch.uint8)
    _release(
        (out, latents, weight, scratch),
        num_tokens,
        latents.stride(0),
        heads,
        kv_dim - v_dim,
        width - rank,
        v_dim,
        rank,
        latents.dtype == torch.bfloat16,
        scratch_bytes,
    )
    return out
