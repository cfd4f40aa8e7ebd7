"""`StateOps` on a CPU in C (`csrc/ssm.c`): all for float32 and bfloat16, only the scans for float16."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.native import Kernel
from quire.kernels.reference.ssm import (
    GATES,
    L2_EPS,
    ConvWeights,
    DeltaInputs,
    MambaInputs,
    ScanInputs,
    SSMSequences,
    StateReference,
)

_MAX_KERNEL, _MAX_DIM = 8, 512
"""Maximum sizes of the convolution kernel and of a state dimension, equal to those in ssm.c."""

_SEQS = "starts rows positions"
"""Names of the pointers by which a kernel gets the sequences, in the order of the tensors of
`_seq_tensors`."""
_conv = Kernel(
    "quire_state_conv",
    f"out x weight bias state {_SEQS}",
    "states_per_row num_seqs channels stride kernel activated bf16",
)
_scan = Kernel(
    "quire_state_scan",
    f"out xbc dt rate bias skip state {_SEQS}",
    "states_per_row num_seqs heads groups dim size stride dt_stride bf16",
    "least most",
)
_select = Kernel(
    "quire_state_select",
    f"out x gate dt b c rate bias skip state {_SEQS}",
    "states_per_row num_seqs channels size x_stride gate_stride dt_stride bc_stride bf16",
)
_delta = Kernel(
    "quire_state_delta",
    f"out qkv a b rate bias state {_SEQS}",
    "states_per_row num_seqs heads key_heads key_dim dim stride a_stride b_stride by_channel bf16",
    "eps log_bound beta_scale",
)
_gated_norm = Kernel(
    "quire_gated_norm", "out x gate weight", "num_rows pieces size stride gate_stride gate_first bf16", "eps"
)
_gate = Kernel("quire_gate", "out x gate", "num_rows size stride gate_stride by bf16")


class CPUStateOps(StateReference):
    """Operations of layers with an SSM state (`StateOps`) on a CPU in C. Torch computes sizes beyond the
    limits of the kernels."""

    def conv(self, x: Tensor, weights: ConvWeights, state: Tensor, seqs: SSMSequences) -> Tensor:
        weight, bias, activated = weights
        (num_tokens, channels), kernel = x.shape, weight.shape[1]
        if kernel > _MAX_KERNEL:
            return super().conv(x, weights, state, seqs)
        assert x.dtype == weight.dtype == state.dtype and x.stride(1) == 1
        out = torch.empty(num_tokens, channels, dtype=x.dtype)
        tensors = out, x, weight, bias, state, *_seq_tensors(seqs)
        is_bf16 = x.dtype == torch.bfloat16
        _conv(tensors, *_sizes(seqs), channels, x.stride(0), kernel, activated, is_bf16)
        return out

    def scan(self, xbc: Tensor, mamba: ScanInputs, state: Tensor, seqs: SSMSequences) -> Tensor:
        (dt, rates, skip, limits), (heads, head_dim, size) = mamba, state.shape[1:]
        if max(head_dim, size) > _MAX_DIM:
            return super().scan(xbc, mamba, state, seqs)
        assert xbc.dtype == dt.dtype and xbc.stride(1) == dt.stride(1) == 1 and state.is_contiguous()
        out = torch.empty(len(xbc), heads * head_dim, dtype=xbc.dtype)
        groups = (xbc.shape[1] - heads * head_dim) // (2 * size)
        tensors = out, xbc, dt, *rates, skip, state, *_seq_tensors(seqs)
        strides, is_bf16 = (xbc.stride(0), dt.stride(0)), xbc.dtype == torch.bfloat16
        _scan(tensors, *_sizes(seqs), heads, groups, head_dim, size, *strides, is_bf16, *limits)
        return out

    def select(
        self, x: Tensor, gate: Tensor, mamba: MambaInputs, state: Tensor, seqs: SSMSequences
    ) -> Tensor:
        channels, size = state.shape[1:]
        dt, b, c, rates, skip = mamba
        if size > _MAX_DIM:
            return super().select(x, gate, mamba, state, seqs)
        assert {part.dtype for part in (gate, dt, b, c)} == {x.dtype} and b.stride(0) == c.stride(0)
        assert all(part.stride(1) == 1 for part in (x, gate, dt, b, c)) and state.is_contiguous()
        out = torch.empty(len(x), channels, dtype=x.dtype)
        tensors = out, x, gate, dt, b, c, *rates, skip, state, *_seq_tensors(seqs)
        strides = x.stride(0), gate.stride(0), dt.stride(0), b.stride(0)
        _select(tensors, *_sizes(seqs), channels, size, *strides, x.dtype == torch.bfloat16)
        return out

    def delta(self, qkv: Tensor, inputs: DeltaInputs, state: Tensor, seqs: SSMSequences) -> Tensor:
        (a, b, rates, form), (heads, key_dim, value_dim) = inputs, state.shape[1:]
        if max(key_dim, value_dim) > _MAX_DIM:
            return super().delta(qkv, inputs, state, seqs)
        assert qkv.dtype == a.dtype == b.dtype and qkv.stride(1) == a.stride(1) == b.stride(1) == 1
        assert state.is_contiguous() and len(rates.bias) == a.shape[1]
        out = torch.empty(len(qkv), heads * value_dim, dtype=qkv.dtype)
        key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
        tensors = out, qkv, a, b, *rates, state, *_seq_tensors(seqs)
        strides = qkv.stride(0), a.stride(0), b.stride(0)
        kinds = a.shape[1] > heads, qkv.dtype == torch.bfloat16
        sizes = *_sizes(seqs), heads, key_heads, key_dim, value_dim
        _delta(tensors, *sizes, *strides, *kinds, L2_EPS, *form)
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
        assert x.dtype == gate.dtype == weight.dtype and x.stride(1) == gate.stride(1) == 1
        (num_tokens, width), size = x.shape, len(weight)
        out = torch.empty(num_tokens, width, dtype=x.dtype)
        strides, is_bf16 = (x.stride(0), gate.stride(0)), x.dtype == torch.bfloat16
        _gated_norm(
            (out, x, gate, weight), num_tokens, width // size, size, *strides, gate_first, is_bf16, eps
        )
        return out

    def gate(self, x: Tensor, gate: Tensor, by: str) -> Tensor:
        assert x.dtype == gate.dtype and x.stride(1) == gate.stride(1) == 1
        out = torch.empty(*x.shape, dtype=x.dtype)
        strides = x.stride(0), gate.stride(0)
        _gate((out, x, gate), *x.shape, *strides, GATES.index(by), x.dtype == torch.bfloat16)
        return out


def _in_float32(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `method`, an operation of `CPUStateOps`, for float16 inputs: they are converted to float32,
    computed in C, and the output is converted back."""

    def scan(self: StateReference, x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        return method(CPUStateOps(), x.float(), *map(_widened, inputs), **options).to(x.dtype)

    return scan


def _widened(value: Any) -> Any:
    """Convert a float16 tensor, or the float16 tensors in a named tuple of inputs, to float32; return other
    values unchanged."""
    if isinstance(value, DeltaInputs | MambaInputs | ScanInputs):
        return type(value)(*map(_widened, value))
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value


class HalfStateOps(StateReference):
    """Operations of layers with an SSM state (`StateOps`) for float16 on a CPU: scans are computed in C in
    float32, the other operations by torch."""

    scan = _in_float32(CPUStateOps.scan)
    select = _in_float32(CPUStateOps.select)
    delta = _in_float32(CPUStateOps.delta)


def _seq_tensors(seqs: SSMSequences) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors that describe the sequences to a kernel, in the order of `_SEQS`: first tokens, rows
    of the states, positions."""
    return seqs.starts, seqs.rows, seqs.positions


def _sizes(seqs: SSMSequences) -> tuple[int, int]:
    return seqs.states_per_row, len(seqs.lens)
