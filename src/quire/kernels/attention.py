"""Paged attention in C (`csrc/attention.c`). The reference in torch is the TORCH_SDPA backend."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.native import bind

HEAD_DIM_STEP = 8
"""Head sizes are multiples of this: the widest vector that the kernel uses."""
_TYPES = (torch.float32, torch.bfloat16)


class _Job(ctypes.Structure):
    """The same fields, in the same order, as in attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "q", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("rows", "block_tables", "query_starts", "seq_lens")),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("table_width", "num_seqs", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("q_bf16", "kv_bf16", "num_threads")),
    ]


@functools.cache
def _attention() -> Callable[..., None]:
    return bind("quire_attention", ctypes.POINTER(_Job))


@functools.cache
def _write() -> Callable[..., None]:
    pointers, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 4
    return bind("quire_write_kv", *pointers, *sizes, ctypes.c_int32, ctypes.c_int32)


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """[T, kv_heads, head_dim] keys and values into their slots, rounded if the cache is narrower."""
    assert k.dtype == v.dtype and (k.dtype == k_cache.dtype or k.dtype == torch.float32)
    k, v = _rows(k), _rows(v)
    _write()(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        len(slots),
        k.stride(0),
        v.stride(0),
        k.shape[1] * k.shape[2],
        k.dtype == torch.bfloat16,
        k_cache.dtype == torch.bfloat16,
    )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    rows: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[T, heads, head_dim] queries of all sequences -> the same shape. Caches as the backends have them."""
    assert q.dtype in _TYPES and k_cache.dtype in _TYPES and k_cache.is_contiguous()
    q = _rows(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    job = _Job(
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        rows.data_ptr(),
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        q.stride(0),
        block_tables.shape[1],
        len(seq_lens),
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        window or 0,
        scale,
        softcap or 0.0,
        q.dtype == torch.bfloat16,
        k_cache.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    _attention()(job)
    return out


def _rows(x: Tensor) -> Tensor:
    """`x` with the heads of a token side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
