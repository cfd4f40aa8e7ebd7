"""Activations on a GPU; the reference is `kernels/reference/activations.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import follow, launch, overlap

_AT_ONCE = 2048
"""Elements per program."""


@triton.jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Return silu(gate) * up elementwise; both steps are rounded to the dtype of `gate`, as in torch."""
    wide = gate.to(tl.float32)
    return (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return the activation of x in float32; the reference is `kernels/reference/activations.py`."""
    if ACTIVATION == "silu":
        y = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2", "unknown activation")
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.constexpr_function
def has_bound(activation: str) -> bool:
    return "<" in activation


@triton.constexpr_function
def bound_of(activation: str) -> float:
    return float(activation.partition("<")[2])


@triton.constexpr_function
def name_of(activation: str) -> str:
    return activation.partition("<")[0]


@triton.jit
def times(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return act(gate) * up elementwise."""
    if ACTIVATION == "silu":
        y = silu_times(gate, up)
    elif ACTIVATION == "clamped_swiglu":
        g = tl.minimum(gate.to(tl.float32), 7.0)
        u = tl.clamp(up.to(tl.float32), -7.0, 7.0)
        y = (g * tl.sigmoid(1.702 * g) * (u + 1)).to(gate.dtype)
    elif has_bound(ACTIVATION):
        BOUND: tl.constexpr = bound_of(ACTIVATION)
        g = activated(gate.to(tl.float32), name_of(ACTIVATION)).to(gate.dtype)
        g = tl.minimum(g.to(tl.float32), BOUND)
        y = (g * tl.clamp(up.to(tl.float32), -BOUND, BOUND)).to(gate.dtype)
    else:
        y = activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype) * up
    return y


@triton.jit
def _gated(
    out: tl.tensor, x: tl.tensor, size: tl.tensor, stride: tl.tensor,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    follow(OVERLAP)
    gate = tl.load(x + row * stride + at, mask=at < size, other=0.0)
    up = tl.load(x + row * stride + size + at, mask=at < size, other=0.0)
    tl.store(out + row * size + at, times(gate, up, ACTIVATION), mask=at < size)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up [T, n] for `gate_up` [T, 2n], the gate and up projections side by side."""
    size = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), size, dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        ahead = overlap(len(gate_up), size)
        launch(_gated, len(gate_up), triton.cdiv(size, _AT_ONCE))(
            out, gate_up, size, gate_up.stride(0), ACTIVATION=activation, BLOCK=_AT_ONCE, OVERLAP=ahead,
            launch_pdl=ahead,
        )  # fmt: skip
    return out
