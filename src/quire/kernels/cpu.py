"""The operations in C (`csrc/fused.c`) for float32 and bfloat16 on a CPU."""

import torch
from torch import Tensor

from quire.kernels.native import Kernel, structure
from quire.kernels.ops import Entry
from quire.kernels.reference import Reference

TYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 1024
"""As in fused.c."""

ACTIVATIONS = {
    name: number
    for number, name in enumerate(("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"))
}
"""Numbers of the activations, as in activations.h."""

_embed = Kernel("quire_embed")
_EmbedJob = structure("out ids table", "num_rows row_bytes")
_norm = Kernel("quire_norm")
_NormJob = structure("out x weight residual", "num_rows size bf16", "eps")
_activate = Kernel("quire_activate")
_ActivateJob = structure("out x", "num_rows size stride activation gated bf16")
_rotate = Kernel("quire_rotate_and_write")
_RotateJob = structure(
    "out qkv table q_norm k_norm positions slots k_cache v_cache",
    "num_tokens stride heads kv_heads head_dim rotary_dim bf16 cache_bf16",
    "eps",
)


class CPUOps(Reference):
    """`Ops` in C, for a CPU; what has no kernel is left to torch."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype)
        job = _EmbedJob(
            out.data_ptr(),
            ids.data_ptr(),
            table.data_ptr(),
            len(ids),
            table.shape[1] * table.itemsize,
        )
        _embed(job, out, ids, table)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(x, None, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous() and residual.dtype == x.dtype
        return self._normed(x, residual, weight, eps)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != weight.dtype:
            return super().norm(x if residual is None else residual.add_(x), weight, eps)
        x = x.contiguous()
        out, size = x.new_empty(x.shape), x.shape[-1]
        job = _NormJob(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if residual is None else residual.data_ptr(),
            x.numel() // size,
            size,
            x.dtype == torch.bfloat16,
            eps,
        )
        _norm(job, out, x, weight, *(() if residual is None else (residual,)))
        return out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return self._activated(gate_up, activation, gate_up.shape[1] // 2)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return self._activated(x, activation, x.shape[1])

    def _activated(self, x: Tensor, activation: str, size: int) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(len(x), size, dtype=x.dtype)
        job = _ActivateJob(
            out.data_ptr(),
            x.data_ptr(),
            len(x),
            size,
            x.stride(0),
            ACTIVATIONS[activation],
            size < x.shape[1],
            x.dtype == torch.bfloat16,
        )
        _activate(job, out, x)
        return out

    def rotate_and_write(self, qkv: Tensor, entry: Entry) -> Tensor:
        heads, table, positions, slots, k_cache, v_cache, norms, *_ = entry
        kv_heads, head_dim = k_cache.shape[2:]
        if k_cache.dtype not in TYPES or head_dim > _MAX_HEAD_DIM:
            return super().rotate_and_write(qkv, entry)
        assert qkv.stride(1) == 1 and qkv.dtype == table.dtype and k_cache.is_contiguous()
        out = torch.empty(len(qkv), heads, head_dim, dtype=qkv.dtype)
        job = _RotateJob(
            out.data_ptr(),
            qkv.data_ptr(),
            table.data_ptr(),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            len(qkv),
            qkv.stride(0),
            heads,
            kv_heads,
            head_dim,
            table.shape[1],
            qkv.dtype == torch.bfloat16,
            k_cache.dtype == torch.bfloat16,
            0.0 if norms is None else norms.eps,
        )
        weights = () if norms is None else (norms.q, norms.k)
        _rotate(job, out, qkv, table, positions, slots, k_cache, v_cache, *weights)
        return out
