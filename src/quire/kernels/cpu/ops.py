"""`Ops` for float32 and bfloat16 on a CPU, in C (`csrc/fused.c`)."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels.cpu import moe
from quire.kernels.cpu.attention import CACHE_DTYPES, slot_stride
from quire.kernels.cpu.native import TYPES, Kernel
from quire.kernels.ops import HeadEntry
from quire.kernels.reference.activations import in_c
from quire.kernels.reference.ops import Reference, head_size

_MAX_HEAD_DIM = 1024
"""Maximum head size, equal to that in heads.h."""
_MAX_RANK = 512
"""Maximum LoRA rank, equal to that in lora.c."""

_embed = Kernel("quire_embed", "out ids table", "num_rows row_bytes")
_norm = Kernel(
    "quire_norm",
    "out x weight bias residual",
    "num_rows size stride out_stride centred bf16 weight_bf16",
    "eps",
)
_activate = Kernel("quire_activate", "out x", "num_rows size stride activation gated bf16", "bound")
_change = Kernel("quire_change", "x other", "num_rows size stride other_stride change bf16", "by")
_SCALE, _SOFTCAP, _ADD, _WEIGH, _WEIGH_ROWS, _SCALE_ROWS, _SCALE_COLUMNS = range(7)
"""Numbers of the elementwise operations, equal to those in fused.c."""
_lora = Kernel(
    "quire_lora",
    "out x a b tokens part_ends ids ranks",
    "num_tokens num_parts rank size_in x_stride out_stride a_stride b_stride bf16 own_bf16",
)
_rotate = Kernel(
    "quire_rotate_and_write",
    "out qkv table q_norm k_norm positions slots k_cache v_cache",
    "num_tokens stride heads kv_heads head_dim slot_stride rotary_dim bf16 kept norm_bf16",
    "eps k_scale v_scale",
)


class CPUOps(Reference):
    """Operations of a model between its GEMMs (`Ops`) on a CPU in C; those without a kernel use torch."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype)
        _embed((out, ids, table), len(ids), table.shape[1] * table.itemsize)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._run_norm(x, weight, None, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._run_norm(x, weight, None, eps, residual=residual)

    def norm_parts(self, x: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
        start = 0
        for weight in weights:
            part = x[:, start : start + len(weight)]
            self._run_norm(part, weight, None, eps, out=part)
            start += len(weight)
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._run_norm(x, weight, bias, eps, centred=True)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return self._run_norm(x, weight, bias, eps, centred=True, residual=residual)

    def _run_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        centred: bool = False,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert weight.dtype in (x.dtype, torch.float32) and (bias is None or bias.dtype == weight.dtype)
        assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)
        x = _in_rows(x)
        out = x.new_empty(x.shape) if out is None else out
        size = x.shape[-1]
        _norm(
            (out, x, weight, bias, residual),
            x.numel() // size,
            size,
            size if x.is_contiguous() else x.stride(0),
            size if out.is_contiguous() else out.stride(0),
            centred,
            x.dtype == torch.bfloat16,
            weight.dtype == torch.bfloat16,
            eps,
        )
        return out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return self._run_activation(gate_up, activation, gate_up.shape[1] // 2)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return self._run_activation(x, activation, x.shape[1])

    def _run_activation(self, x: Tensor, activation: str, size: int) -> Tensor:
        x = _in_rows(x)
        out = torch.empty(len(x), size, dtype=x.dtype)
        number, bound = in_c(activation)
        is_gated, is_bf16 = size < x.shape[1], x.dtype == torch.bfloat16
        _activate((out, x), len(x), size, x.stride(0), number, is_gated, is_bf16, bound)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._run_elementwise(x, _SCALE, by=factor)

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        return self._run_elementwise(x, _SCALE_ROWS, factors)

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        return self._run_elementwise(x, _SCALE_COLUMNS, factors.expand_as(x))

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._run_elementwise(x, _SOFTCAP, by=cap)

    def weigh(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._run_elementwise(x, _WEIGH if gate.shape == x.shape else _WEIGH_ROWS, gate)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._run_elementwise(x, _ADD, y)

    def _run_elementwise(
        self, x: Tensor, change: int, other: Tensor | None = None, by: float = 0.0
    ) -> Tensor:
        """Apply the elementwise operation `change`, such as _SCALE, to x [T, n] in place. Its operand is the
        tensor `other` or the number `by`."""
        assert x.dim() == 2 and x.stride(1) == 1
        kind = torch.float32 if change == _SCALE_ROWS else x.dtype
        assert other is None or (other.dtype == kind and other.stride(1) == 1)
        other_stride = 0 if other is None else other.stride(0)
        _change((x, other), *x.shape, x.stride(0), other_stride, change, x.dtype == torch.bfloat16, by)
        return x

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return moe.route(logits, routing, bias)

    def rotate_and_write(self, qkv: Tensor, entry: HeadEntry) -> Tensor:
        heads, table, positions, slots, k_cache, v_cache, norms, *scales = entry
        kv_heads, head_dim = k_cache.shape[2], head_size(k_cache)
        if k_cache.dtype not in CACHE_DTYPES or head_dim > _MAX_HEAD_DIM:
            return super().rotate_and_write(qkv, entry)
        assert qkv.stride(1) == 1 and qkv.dtype == table.dtype
        out = torch.empty(len(qkv), heads, head_dim, dtype=qkv.dtype)
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
        _rotate(
            (out, qkv, table, q_norm, k_norm, positions, slots, k_cache, v_cache),
            len(qkv),
            qkv.stride(0),
            heads,
            kv_heads,
            head_dim,
            slot_stride(k_cache, v_cache),
            table.shape[1],
            qkv.dtype == torch.bfloat16,
            CACHE_DTYPES[k_cache.dtype],
            q_norm is not None and q_norm.dtype == torch.bfloat16,
            eps,
            *scales,
        )
        return out

    def lora(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Tensor
    ) -> Tensor:
        width = len(part_sizes) * b.shape[2]
        assert x.dtype == out.dtype
        ranks = torch.empty(len(x), width, dtype=torch.float32)
        _add_lora(out, _in_rows(x), None, a, b, part_sizes, tokens, ranks)
        return out

    def lora_rows(self, out: Tensor, ids: Tensor, a: Tensor, b: Tensor, tokens: Tensor) -> Tensor:
        ranks = torch.empty(0, dtype=torch.float32)
        _add_lora(out, None, ids.contiguous(), a, b, (b.shape[1],), tokens, ranks)
        return out

    def lora_shrink(self, x: Tensor, a: Tensor, tokens: Tensor) -> Tensor:
        ranks = torch.empty(len(x), a.shape[1], dtype=torch.float32)
        _add_lora(None, _in_rows(x), None, a, None, (), tokens, ranks)
        return ranks

    def lora_expand(
        self, out: Tensor, ranks: Tensor, b: Tensor, part_sizes: tuple[int, ...], tokens: Tensor
    ) -> Tensor:
        _add_lora(out, None, None, None, b, part_sizes, tokens, ranks.contiguous())
        return out


def _add_lora(
    out: Tensor | None,
    x: Tensor | None,
    ids: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    part_sizes: tuple[int, ...],
    tokens: Tensor,
    ranks: Tensor,
) -> None:
    """Run the LoRA kernel; for the arguments see `Ops.lora`. Without `out` it only computes `ranks` from x
    and `a`; without x it only adds `ranks` times `b` to `out`. With `ids` (an embedding layer), `ranks` are
    rows of `a`."""
    weights = [matrix for matrix in (a, b) if matrix is not None]
    like = x if out is None else out
    assert like is not None and len(like) == len(tokens) and {matrix.dtype for matrix in weights} <= {*TYPES}
    assert tokens.dtype == torch.int32 and tokens.is_contiguous() and ranks.dtype == torch.float32
    assert (
        all(matrix[0].is_contiguous() for matrix in weights)
        and len({matrix.dtype for matrix in weights}) == 1
    )
    num_parts, rank = (1, ranks.shape[1]) if b is None else (len(part_sizes), b.shape[2])
    assert rank <= _MAX_RANK if ids is not None else ranks.shape[1] == num_parts * rank
    assert out is None or b is None or out.stride(1) == 1 and out.shape[1] == sum(part_sizes) == b.shape[1]
    _lora(
        (out, x, a, b, tokens, _ends(part_sizes), ids, ranks),
        len(tokens),
        num_parts,
        rank,
        0 if a is None else a.shape[2],
        0 if x is None else x.stride(0),
        0 if out is None else out.stride(0),
        0 if a is None else a.stride(0),
        0 if b is None else b.stride(0),
        like.dtype == torch.bfloat16,
        weights[0].dtype == torch.bfloat16,
    )


@cache
def _ends(sizes: tuple[int, ...]) -> Tensor:
    """Return the end offset of each part of a layer's outputs (such as queries, keys and values), int64, for
    parts of these sizes."""
    return torch.from_numpy(np.cumsum(sizes, dtype=np.int64))


def _in_rows(x: Tensor) -> Tensor:
    """Return x [..., n], copied unless its rows are contiguous and have one stride."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1) else x.contiguous()
