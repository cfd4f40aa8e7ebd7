"""Around latent attention in C (`csrc/latent.c`). The reference in torch is `attention/mla.py`."""

import torch
from torch import Tensor

from quire.kernels.cpu.attention import KEPT
from quire.kernels.cpu.linear import FORMS, PANEL, Matrix
from quire.kernels.cpu.native import Kernel, structure

_TASK_ROWS = 64
"""As in latent.c."""
_MAX_HEAD_DIM = 1024
"""As in heads.h."""
_MAX_RANK = 4096
"""As in latent.c."""
_enter = Kernel("quire_latent_enter")
_EnterJob = structure(
    "q kv norm table positions slots cache",
    "num_tokens q_stride kv_stride heads nope_dim rope_dim rank neighbours bf16 kept",
    "eps scale",
)
_absorb = Kernel("quire_latent_absorb")
_release = Kernel("quire_latent_release")
_HeadsJob = structure(
    "out x weight scratch", "num_tokens x_stride heads nope_dim rope_dim v_dim rank bf16 scratch_bytes"
)


def enter(
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
    """The last numbers of [T, heads, nope_dim + rope_dim] queries turn in place; [T, rank + rope_dim] latents
    and keys are normed and turned into their slots of the cache, of 8 bits divided by `scale`."""
    (num_tokens, heads, query_dim), rope_dim = q.shape, table.shape[1]
    assert q.dtype in FORMS and {q.dtype} == {x.dtype for x in (kv, norm, table)}
    assert q.stride()[1:] == (query_dim, 1) and kv.stride(1) == 1
    assert cache.dtype in KEPT and cache.is_contiguous() and table.is_contiguous()
    assert rope_dim <= _MAX_HEAD_DIM and cache.shape[2] - rope_dim <= _MAX_RANK
    job = _EnterJob(
        *(x.data_ptr() for x in (q, kv, norm, table, positions, slots, cache)),
        num_tokens,
        q.stride(0),
        kv.stride(0),
        heads,
        query_dim - rope_dim,
        rope_dim,
        cache.shape[2] - rope_dim,
        neighbours,
        q.dtype == torch.bfloat16,
        KEPT[cache.dtype],
        eps,
        scale,
    )
    _enter(job, q, kv, norm, table, positions, slots, cache)


def absorb(q: Tensor, weight: Tensor, *, rope_dim: int) -> Tensor:
    """What [T, heads, nope_dim + rope_dim] queries look for in a cache: [T, heads, rank + rope_dim]. A row
    has the same bits alone and in any batch, with any number of threads."""
    num_tokens, heads, query_dim = q.shape
    nope_dim = query_dim - rope_dim
    assert q.dtype in FORMS and q.dtype == weight.dtype and q.stride()[1:] == (query_dim, 1)
    out = q.new_empty(num_tokens, heads, weight.shape[2] + rope_dim)
    job = _HeadsJob(
        out.data_ptr(),
        q.data_ptr(),
        weight.data_ptr(),
        None,
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
    _absorb(job, out, q, weight)
    return out


def release(seen: Tensor, weight: Tensor, *, v_dim: int) -> Tensor:
    """[T, heads, rank + rope_dim] sums of what is in a cache -> [T, heads, v_dim] of values. As with
    `absorb`, a row has the same bits in any company."""
    num_tokens, heads, width = seen.shape
    _, both, rank = weight.shape
    assert seen.dtype in FORMS and seen.dtype == weight.dtype and seen.is_contiguous()
    out = seen.new_empty(num_tokens, heads, v_dim)
    num_rows = min(num_tokens, _TASK_ROWS) + PANEL - 1
    scratch_bytes = num_rows * Matrix.plain(weight[0]).prepared_bytes
    scratch = torch.empty(torch.get_num_threads() * scratch_bytes, dtype=torch.uint8)
    job = _HeadsJob(
        out.data_ptr(),
        seen.data_ptr(),
        weight.data_ptr(),
        scratch.data_ptr(),
        num_tokens,
        seen.stride(0),
        heads,
        both - v_dim,
        width - rank,
        v_dim,
        rank,
        seen.dtype == torch.bfloat16,
        scratch_bytes,
    )
    _release(job, out, seen, weight, scratch)
    return out
