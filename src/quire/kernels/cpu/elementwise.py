"""Elementwise torch operations as C kernels (`csrc/elementwise.c`), so that tapes can record them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.gguf import GGUFRows
from quire.kernels.cpu.linear import FORMS, LinearProduct, Matrix
from quire.kernels.cpu.native import Kernel
from quire.kernels.cpu.ops import CPUOps

_ATEN = torch.ops.aten
_DIMS = 4
_SILU, _GELU, _GELU_TANH, _RELU = range(4)
_COPY, _NEGATE, _SQUARE, _CUBE, _RSQRT, _TANH, _SIGMOID, _COS, _SIN = range(16, 25)
_ADD, _SUBTRACT, _MULTIPLY, _DIVIDE = range(25, 29)
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2}
"""Numbers of the types of elements in elementwise.c. Integers are only read."""
_UNARY = {
    _ATEN.silu.default: _SILU,
    _ATEN.relu.default: _RELU,
    _ATEN.neg.default: _NEGATE,
    _ATEN.rsqrt.default: _RSQRT,
    _ATEN.tanh.default: _TANH,
    _ATEN.sigmoid.default: _SIGMOID,
    _ATEN.cos.default: _COS,
    _ATEN.sin.default: _SIN,
}
_BINARY = {
    _ATEN.add.Tensor: _ADD,
    _ATEN.sub.Tensor: _SUBTRACT,
    _ATEN.mul.Tensor: _MULTIPLY,
    _ATEN.div.Tensor: _DIVIDE,
}
_COPIES = {
    _ATEN.reshape.default,
    _ATEN.flatten.using_ints,
    _ATEN.contiguous.default,
    _ATEN.clone.default,
    _ATEN.to.dtype,
    _ATEN.to.device,
    _ATEN._to_copy.default,
    _ATEN.type_as.default,
}
"""Operations that may copy their first argument, to another type or memory layout."""
_CONSTANT = {
    _ATEN.arange.default,
    _ATEN.arange.start,
    _ATEN.full.default,
    _ATEN.ones.default,
    _ATEN.scalar_tensor.default,
    _ATEN.zeros.default,
}
"""Operations with the same result in every run of a computation that the tape can replay."""
_dims = [[f"{name}{d}" for d in range(_DIMS)] for name in ("size", "out", "a", "b")]
_elementwise = Kernel(
    "quire_elementwise", "out_at a_at b_at", f"op out_type a_type b_type {' '.join(sum(_dims, []))}", "scalar"
)
_mean = Kernel("quire_mean", "out x", "rows columns")
_OPS = CPUOps()

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Function that allocates a tensor of a size and type."""


def run_recorded(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, take: Take
) -> Tensor | None:
    """Compute a torch operation by C kernels, given its `result` by torch, whose type and strides are used.
    Return None if there is no kernel for it."""
    if not isinstance(result, Tensor) or result.device.type != "cpu" or not result.numel():
        return None
    if func in _CONSTANT or func is _ATEN.dropout.default and not args[2]:
        return result
    if result.dtype not in FORMS:
        return None
    if func is _ATEN.embedding.default:
        return _embed(args[0], args[1], result)
    if func is _ATEN.linear.default:
        return _multiply(*args, result=result)
    if func is _ATEN.layer_norm.default:
        return _normalize(*args[:5], result=result)
    out = take((result.numel(),), result.dtype).as_strided(result.shape, result.stride())
    if func is _ATEN.cat.default:
        dim = args[1] if len(args) > 1 else 0
        spans = out.split([part.shape[dim] for part in args[0]], dim)
        return out if all(map(_copy, args[0], spans)) else None
    if func is _ATEN.stack.default:
        return out if all(map(_copy, args[0], out.unbind(*args[1:]))) else None
    is_done = False
    if func in _COPIES:
        is_done = _copy(args[0], out)
    elif func in _UNARY:
        is_done = _run(_UNARY[func], out, args[0])
    elif func in _BINARY and kwargs.get("alpha", 1) == 1:
        is_done = _run(_BINARY[func], out, *args)
    elif func is _ATEN.gelu.default:
        is_tanh = kwargs.get("approximate", "none") == "tanh"
        is_done = _run(_GELU_TANH if is_tanh else _GELU, out, args[0])
    elif func is _ATEN.pow.Tensor_Scalar and args[1] in (2, 3):
        is_done = _run(_SQUARE if args[1] == 2 else _CUBE, out, args[0])
    elif func is _ATEN.repeat_interleave.self_int and not kwargs and len(args) == 3:
        is_done = _repeat(args[0], args[1], args[2], out)
    elif func is _ATEN.mean.dim:
        is_done = _average(*args, out=out)
    return out if is_done else None


def _copy(source: Tensor, out: Tensor) -> bool:
    """Copy a tensor to one with the same elements in the same order, perhaps of another shape; return whether
    a kernel can."""
    if out.shape != source.shape and not out.is_contiguous():
        return False
    return _run(_COPY, out.view(source.shape) if out.shape != source.shape else out, source)


def _run(op: int, out: Tensor, a: Any, b: Any = None) -> bool:
    """Compute op(a, b) into `out`; return whether the kernel supports the arguments. `b` may be a number, or
    missing."""
    tensors = [out, *(x.expand(out.shape) for x in (a, b) if isinstance(x, Tensor))]
    if not isinstance(a, Tensor) or any(x.dtype not in _TYPES or x.device.type != "cpu" for x in tensors):
        return False
    dims = _joined([(size, *(x.stride(d) for x in tensors)) for d, size in enumerate(out.shape)])
    if len(dims) > _DIMS:
        return False
    dims = [(1, *[0] * len(tensors))] * (_DIMS - len(dims)) + dims
    numbers = [number for column in zip(*dims, strict=True) for number in column]
    numbers += [0] * (_DIMS * (3 - len(tensors)))
    types = [_TYPES[x.dtype] for x in tensors]
    second = b if isinstance(b, Tensor) else None
    scalar = 0.0 if b is None or second is not None else float(b)
    _elementwise((out, a, second), op, *types, *[0] * (3 - len(types)), *numbers, scalar)
    return True


def _joined(dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return dimensions (size, strides of all tensors) without those of size 1, and with neighbours joined
    where all tensors have them in one line."""
    joined: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if size == 1:
            continue
        if joined and all(
            outer == inner * size for outer, inner in zip(joined[-1][1:], strides, strict=True)
        ):
            joined[-1] = joined[-1][0] * size, *strides
        else:
            joined.append((size, *strides))
    return joined


def _repeat(x: Tensor, times: int, dim: int, out: Tensor) -> bool:
    dim %= x.dim()
    return _run(_COPY, out.unflatten(dim, (-1, times)), x.unsqueeze(dim + 1))


def _average(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, out: Tensor) -> bool:
    is_last = dims is not None and [dim % x.dim() for dim in dims] == [x.dim() - 1]
    if not is_last or x.dtype != torch.float32 or out.dtype != torch.float32 or not x.is_contiguous():
        return False
    _mean((out, x), out.numel(), x.shape[-1])
    return True


def _normalize(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    result: Tensor,
) -> Tensor | None:
    is_alike = all(y is None or y.dtype == result.dtype for y in (x, weight, bias))
    if weight is None or len(shape) != 1 or not is_alike or not x.is_contiguous():
        return None
    return _OPS.layer_norm(x.view(-1, x.shape[-1]), weight, bias, eps).view(result.shape)


def _embed(weight: Tensor, ids: Tensor, result: Tensor) -> Tensor | None:
    if weight.dtype != result.dtype or not weight.is_contiguous() or ids.dtype != torch.int64:
        return None
    return GGUFRows(Matrix.plain(weight))(ids.flatten(), result.dtype).view(result.shape)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, result: Tensor) -> Tensor | None:
    if not {x.dtype, weight.dtype} <= {result.dtype} or not weight.is_contiguous():
        return None
    rows = x.view(-1, x.shape[-1]) if x.is_contiguous() else None
    return None if rows is None else LinearProduct([Matrix.plain(weight)], bias)(rows).view(result.shape)
