"""Paged attention in C (`csrc/attention.c`). The reference in torch is the TORCH_SDPA backend."""

import ctypes
import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.cpu.native import TYPES, Kernel, c_function, recording

HEAD_DIM_STEP = 8
"""Head sizes must be a multiple of this number."""
CACHE_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float8_e4m3fn: 2,
    torch.float8_e5m2: 3,
    torch.int8: 4,
}
"""Number by which the C code identifies each KV cache dtype, equal to those in cache_dtype.h."""


class _Job(ctypes.Structure):
    """Arguments of the kernel, with the same fields in the same order as in attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "q", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("rows", "block_tables", "query_starts", "seq_lens", "sinks")),
        *((name, ctypes.c_void_p) for name in ("alibi_slopes", "reach")),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("table_width", "num_seqs", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "block_size", "window", "chunked")),
        *((name, ctypes.c_int64) for name in ("q_bf16", "kept", "sinks_bf16")),
        *((name, ctypes.c_double) for name in ("scale", "v_scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("max_tasks", "max_saved")),
        ("memory", ctypes.c_void_p),
    ]


_attention = Kernel("quire_attention")
_local = threading.local()


@functools.cache
def _scratch_size() -> Callable[..., int]:
    return c_function("quire_attention_room", ctypes.c_int64, ctypes.POINTER(_Job), *[ctypes.c_int64] * 4)


def _scratch(num_bytes: int) -> Tensor:
    """Return [num_bytes or more] uint8 of scratch memory, which this thread uses again in later calls."""
    memory: Tensor | None = getattr(_local, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = _local.memory = torch.empty(num_bytes, dtype=torch.uint8)
    return memory


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    rows: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunked: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    reach: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Return the attention [T, heads, head_dim] of the queries q of this shape to the paged KV cache. The
    caches are [num_blocks, block_size, kv_heads, head_dim]; `scales` are those of cached keys and values.
    `rows` to `seq_lens` are the tensors of `Batch` with these names, and `reach` is `Batch.last_visible`. The
    `window` is a number of keys, or None; a `chunked` window begins at a multiple of its size. `sinks` and
    `alibi_slopes` are [heads]."""
    assert q.dtype in TYPES and k_cache.dtype in CACHE_DTYPES
    assert sinks is None or (sinks.dtype in TYPES and sinks.is_contiguous())
    assert alibi_slopes is None or (alibi_slopes.dtype == torch.float32 and not softcap)
    q, optional = _contiguous_heads(q), (sinks, alibi_slopes, reach)
    out = q.new_empty(q.shape)
    read = q, k_cache, v_cache, rows, block_tables, query_starts, seq_lens
    job = _Job(
        out.data_ptr(),
        *(tensor.data_ptr() for tensor in read),
        *(None if tensor is None else tensor.data_ptr() for tensor in optional),
        q.stride(0),
        block_tables.shape[1],
        len(seq_lens),
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        slot_stride(k_cache, v_cache),
        k_cache.shape[1],
        window or 0,
        chunked,
        q.dtype == torch.bfloat16,
        CACHE_DTYPES[k_cache.dtype],
        sinks is not None and sinks.dtype == torch.bfloat16,
        scale * scales[0],
        scales[1],
        softcap or 0.0,
    )
    if recording():  # sequences may grow until the tables are full, and divide the queries in another way
        max_seq_len = block_tables.shape[1] * k_cache.shape[1]
        max_query_len = len(q) - len(seq_lens) + 1
    scratch = _scratch(_scratch_size()(job, len(q), max_query_len, max_seq_len, torch.get_num_threads()))
    job.memory = scratch.data_ptr()
    _attention.run(job, (out, scratch, *read, *optional))
    return out


def slot_stride(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return the stride in elements between two tokens of the caches [num_blocks, block_size, kv_heads,
    head_dim]. It exceeds kv_heads * head_dim if layers are interleaved in the same memory."""
    _, block_size, _, head_elements = k_cache.shape
    stride = k_cache.stride(1)
    assert k_cache.stride() == v_cache.stride() == (block_size * stride, stride, head_elements, 1)
    return stride


def _contiguous_heads(x: Tensor) -> Tensor:
    """Return x [T, heads, head_dim], copied unless the heads of each token are contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
