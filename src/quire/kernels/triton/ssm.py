"""`StateOps` on a GPU: launches of the kernels of `mamba.py`, `mamba2.py` and `gated_delta.py`, and gates."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import batch_invariant
from quire.kernels.reference.ssm import (
    CHUNK,
    GATES,
    L2_EPS,
    ConvWeights,
    DeltaInputs,
    MambaInputs,
    ScanInputs,
    SSMSequences,
)
from quire.kernels.triton import gated_delta as delta_kernels
from quire.kernels.triton import mamba as select_kernels
from quire.kernels.triton import mamba2 as scan_kernels
from quire.kernels.triton.launch import follow, launch, only_compiles, overlap
from quire.kernels.triton.mamba2 import silu


class SSMShape(NamedTuple):
    """Plan of an SSM kernel: the number of dimensions of a head per program, and compile options."""

    dim: int
    warps: int
    stages: int


_CHANNELS = 256
"""Convolution channels per program; at least the threads of four warps."""
_WIDE_CHANNELS = 512
"""Convolution channels per program for chunks, eight per thread."""
_MOST_TAPS = 4
"""Maximum kernel size of a convolution over chunks; with larger kernels, tokens are processed in order."""
_SMALL, _TILE = 2048, 4096
"""State elements per program for few and for many short sequences."""
_FEW = 512
"""Maximum heads of all sequences for which programs process _SMALL elements, to have enough programs."""
_SCAN_WARPS, _DELTA_WARPS, _SOLVE_WARPS = 8, 4, 4
_SCAN, _DELTA = SSMShape(64, 4, 2), SSMShape(32, 2, 2)
"""Shapes of the kernels that process chunk after chunk. With four warps or more, Triton 3.6 reads tiles of
the delta rule from shared memory before all warps have written them: outputs are wrong."""
_SELECTED = 1024
"""State elements per program of Mamba's scan of short sequences, eight per thread."""
_BLOCKS, _MOST_CHANNELS = (8, 16, 32), (2**14, 2**15)
"""Channels per warp of Mamba's scan of longer sequences (with four, two or one threads per channel). The
second number is used from 2^14 channels of all sequences on, the third from 2^15 on."""
_LEAST = 64
"""Minimum block of keys and values for chunks: with 16, the compiled kernel reads past its shared memory."""
_GATED = 1024
"""Elements per program of the gates, unless a norm is larger."""


@triton.jit
def _gated_norm(
    out: tl.tensor, x: tl.tensor, gate: tl.tensor, weight: tl.tensor, pieces: tl.tensor, size: tl.tensor,
    stride: tl.tensor, gate_stride: tl.tensor, eps: tl.tensor,
    GATE_FIRST: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gated RMS norm of PIECES groups of columns of one token; a group has `size` columns, like
    the weight. Grid: (tokens, pieces / PIECES)."""
    token = tl.program_id(0).to(tl.int64)
    piece, at = tl.program_id(1) * PIECES + tl.arange(0, PIECES), tl.arange(0, BLOCK)
    exists = (piece < pieces)[:, None] & (at < size)[None, :]
    dims = piece[:, None] * size + at[None, :]
    scale = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)[None, :]
    follow(OVERLAP)
    values = tl.load(x + token * stride + dims, mask=exists, other=0.0).to(tl.float32)
    factor = silu(tl.load(gate + token * gate_stride + dims, mask=exists, other=0.0).to(tl.float32))
    if GATE_FIRST:
        values *= factor
    kind = out.dtype.element_ty
    mean = tl.sum(values * values, 1) / size
    values = (values * tl.rsqrt(mean + eps)[:, None]).to(kind).to(tl.float32) * scale
    if not GATE_FIRST:
        values = values.to(kind).to(tl.float32) * factor
    tl.store(out + token * pieces * size + dims, values.to(kind), mask=exists)


@triton.jit
def _gate(
    out: tl.tensor, x: tl.tensor, gate: tl.tensor, size: tl.tensor, stride: tl.tensor, gate_stride: tl.tensor,
    BY: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply BLOCK elements of one token by a function of their gates; BY is its index in `GATES`. Grid:
    (tokens, size / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    values = tl.load(x + token * stride + at, mask=at < size, other=0.0)
    factor = tl.load(gate + token * gate_stride + at, mask=at < size, other=0.0).to(tl.float32)
    if BY == 0:
        factor = tl.sigmoid(factor)
    elif BY == 1:
        factor = silu(factor)
    tl.store(out + token * size + at, values * factor.to(values.dtype), mask=at < size)


class TritonStateOps:
    """Operations of layers with an SSM state (`StateOps`) as Triton kernels, for a GPU."""

    def conv(self, x: Tensor, weights: ConvWeights, state: Tensor, seqs: SSMSequences) -> Tensor:
        weight, bias, activated = weights
        (num_tokens, channels), kernel = x.shape, weight.shape[1]
        out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
        tensors = out, x, weight, weight if bias is None else bias, state
        batch = seqs.starts, seqs.rows, seqs.positions
        num_states, tokenwise = seqs.states_per_row, kernel > _MOST_TAPS
        form = {"KERNEL": kernel, "BIASED": bias is not None, "ACTIVATED": activated, "STATES": num_states}
        blocks = triton.cdiv(channels, _CHANNELS)
        short, count, is_all = _short(seqs, tokenwise=tokenwise)
        if count:
            ahead = overlap(count, channels)
            launch(scan_kernels.conv_short, count, blocks)(
                *tensors, short, *batch, channels, x.stride(0), **form, ALL=is_all, TOKENWISE=tokenwise,
                BLOCK=_CHANNELS, OVERLAP=ahead, launch_pdl=ahead,
            )  # fmt: skip
        if not is_all:
            split = seqs.split
            launch(scan_kernels.conv_chunks, len(split.chunks), triton.cdiv(channels, _WIDE_CHANNELS))(
                *tensors, split.chunks, *batch, channels, x.stride(0), **form, CHUNK=CHUNK,
                BLOCK=_WIDE_CHANNELS, num_warps=_WIDE_CHANNELS // 256,
            )  # fmt: skip
            launch(scan_kernels.conv_keep, len(split.longer), blocks)(
                x, state, split.longer, *batch, channels, x.stride(0), KERNEL=kernel, STATES=num_states,
                BLOCK=_CHANNELS,
            )  # fmt: skip
        return out

    def scan(self, xbc: Tensor, mamba: ScanInputs, state: Tensor, seqs: SSMSequences) -> Tensor:
        (dt, rates, skip, limits), (heads, head_dim, size) = mamba, state.shape[1:]
        num_tokens = len(xbc)
        out = torch.empty(num_tokens, heads * head_dim, dtype=xbc.dtype, device=xbc.device)
        tensors = out, xbc, dt, *rates, skip, state
        rest = seqs.starts, seqs.rows, seqs.positions, xbc.stride(0), dt.stride(0), *limits
        block_size = triton.next_power_of_2(max(size, 16))
        form = {
            "HEADS": heads, "GROUPS": (xbc.shape[1] - heads * head_dim) // (2 * size), "DIM": head_dim,
            "SIZE": size, "STATES": seqs.states_per_row, "BLOCK_SIZE": block_size,
        }  # fmt: skip
        tokenwise = batch_invariant.is_on()
        short, count, is_all = _short(seqs, tokenwise=tokenwise)
        if count:
            block, ahead = _tile(count * heads, head_dim, block_size), overlap(count, heads * head_dim)
            launch(scan_kernels.scan_short, count, heads, triton.cdiv(head_dim, block))(
                *tensors, short, *rest, **form, ALL=is_all, TOKENWISE=tokenwise, BLOCK_DIM=block,
                OVERLAP=ahead, launch_pdl=ahead, num_warps=_SCAN_WARPS,
            )  # fmt: skip
        if not is_all:
            block = min(triton.next_power_of_2(max(head_dim, 16)), _SCAN.dim)
            launch(scan_kernels.scan_chunks, len(seqs.split.longer), heads, triton.cdiv(head_dim, block))(
                *tensors, seqs.split.longer, *rest, **form, CHUNK=CHUNK, BLOCK_DIM=block,
                **_dot_options(xbc.dtype, _SCAN),
            )  # fmt: skip
        return out

    def select(
        self, x: Tensor, gate: Tensor, mamba: MambaInputs, state: Tensor, seqs: SSMSequences
    ) -> Tensor:
        channels, size = state.shape[1:]
        dt, b, c, rates, skip = mamba
        assert b.stride(0) == c.stride(0)
        out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
        batch, strides = (seqs.starts, seqs.rows, seqs.positions), (x.stride(0), gate.stride(0), dt.stride(0))
        tokenwise = batch_invariant.is_on()
        short, count, is_all = _short(seqs, tokenwise=tokenwise)
        if count:
            block_size, ahead = triton.next_power_of_2(size), overlap(count, channels)
            block = max(_SELECTED // block_size, 1)
            launch(select_kernels.select_short, count, triton.cdiv(channels, block))(
                out, x, gate, dt, b, c, *rates, skip, state, short, *batch, channels, *strides, b.stride(0),
                SIZE=size, ALL=is_all, STATES=seqs.states_per_row, TOKENWISE=tokenwise, BLOCK=block,
                BLOCK_SIZE=block_size, OVERLAP=ahead, launch_pdl=ahead,
            )  # fmt: skip
        if not is_all:
            longer, bc = seqs.split.longer, _pack_bc(b, c)
            for block in _BLOCKS if only_compiles() else [_channels_per_warp(len(longer) * channels)]:
                launch(select_kernels.select_tokens, len(longer), triton.cdiv(channels, block))(
                    out, x, gate, dt, bc, *rates, skip, state, longer, *batch, CHANNELS=channels,
                    STRIDES=strides, SIZE=size, STATES=seqs.states_per_row, BLOCK=block,
                    QUARTER=bc.shape[2] // 4, num_warps=1,
                )  # fmt: skip
        return out

    def delta(self, qkv: Tensor, inputs: DeltaInputs, state: Tensor, seqs: SSMSequences) -> Tensor:
        (a, b, rates, form), (heads, key_dim, value_dim) = inputs, state.shape[1:]
        if a.shape[1] > heads:
            return self._delta_by_channel(qkv, inputs, state, seqs)
        assert a.stride(0) == b.stride(0) and not form.log_bound
        out = torch.empty(len(qkv), heads * value_dim, dtype=qkv.dtype, device=qkv.device)
        batch = seqs.starts, seqs.rows, seqs.positions
        strides, scale = (qkv.stride(0), a.stride(0)), key_dim**-0.5
        tokenwise = batch_invariant.is_on()
        short, count, is_all = _short(seqs, tokenwise=tokenwise)
        block_key = triton.next_power_of_2(max(key_dim, 1 if is_all else _LEAST))
        shape = {
            "HEADS": heads, "KEY_HEADS": (qkv.shape[1] - heads * value_dim) // (2 * key_dim),
            "KEY_DIM": key_dim, "DIM": value_dim, "EPS": L2_EPS, "BLOCK_KEY": block_key,
        }  # fmt: skip
        states = {"STATES": seqs.states_per_row}
        if count:
            block, ahead = _tile(count * heads, value_dim, block_key), overlap(count, heads * value_dim)
            launch(delta_kernels.delta_short, count, heads, triton.cdiv(value_dim, block))(
                out, qkv, a, b, *rates, state, short, *batch, *strides, scale, form.beta_scale, **shape,
                **states, ALL=is_all, TOKENWISE=tokenwise, BLOCK_DIM=block, OVERLAP=ahead, launch_pdl=ahead,
                num_warps=_DELTA_WARPS,
            )  # fmt: skip
        if not is_all:
            split, shape, exact = seqs.split, shape | {"CHUNK": CHUNK}, _dot_options(qkv.dtype, _DELTA)
            by_key = torch.empty(len(qkv), heads, key_dim, dtype=qkv.dtype, device=qkv.device)
            by_value = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
            launch(delta_kernels.delta_solve, len(split.chunks), heads)(
                by_key, by_value, qkv, a, b, *rates, split.chunks, seqs.starts, *strides, form.beta_scale,
                LEVELS=CHUNK.bit_length() - 1, BLOCK_DIM=triton.next_power_of_2(max(value_dim, _LEAST)),
                **shape,
                **exact | {"num_warps": _SOLVE_WARPS},
            )  # fmt: skip
            block = min(triton.next_power_of_2(max(value_dim, 16)), _DELTA.dim)
            launch(delta_kernels.delta_chunks, len(split.longer), heads, triton.cdiv(value_dim, block))(
                out, by_key, by_value, qkv, a, *rates, state, split.longer, *batch, *strides, scale, **shape,
                **states, BLOCK_DIM=block, **exact,
            )  # fmt: skip
        return out

    def _delta_by_channel(
        self, qkv: Tensor, inputs: DeltaInputs, state: Tensor, seqs: SSMSequences
    ) -> Tensor:
        """Compute the delta rule with a decay per key channel, token by token."""
        (a, b, rates, form), (heads, key_dim, value_dim) = inputs, state.shape[1:]
        out = torch.empty(len(qkv), heads * value_dim, dtype=qkv.dtype, device=qkv.device)
        count, block_key = len(seqs.lens), triton.next_power_of_2(key_dim)
        block, ahead = _tile(count * heads, value_dim, block_key), overlap(count, heads * value_dim)
        launch(delta_kernels.delta_tokens, count, heads, triton.cdiv(value_dim, block))(
            out, qkv, a, b, *rates, state, seqs.starts, seqs.rows, seqs.positions, qkv.stride(0), a.stride(0),
            b.stride(0), key_dim**-0.5, *form, HEADS=heads,
            KEY_HEADS=(qkv.shape[1] - heads * value_dim) // (2 * key_dim), KEY_DIM=key_dim, DIM=value_dim,
            EPS=L2_EPS, BOUNDED=form.log_bound != 0, STATES=seqs.states_per_row, BLOCK_KEY=block_key,
            BLOCK_DIM=block, OVERLAP=ahead, launch_pdl=ahead, num_warps=_DELTA_WARPS,
        )  # fmt: skip
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
        num_tokens, size = len(x), len(weight)
        pieces, block = x.shape[1] // size, triton.next_power_of_2(size)
        out = torch.empty(num_tokens, pieces * size, dtype=x.dtype, device=x.device)
        at_once, ahead = max(_GATED // block, 1), overlap(num_tokens, x.shape[1])
        launch(_gated_norm, num_tokens, triton.cdiv(pieces, at_once))(
            out, x, gate, weight, pieces, size, x.stride(0), gate.stride(0), eps, GATE_FIRST=gate_first,
            PIECES=at_once, BLOCK=block, OVERLAP=ahead, launch_pdl=ahead,
            num_warps=min(max(block // 256, 4), 16),
        )  # fmt: skip
        return out

    def gate(self, x: Tensor, gate: Tensor, by: str) -> Tensor:
        num_tokens, size = x.shape
        out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
        ahead = overlap(num_tokens, size)
        launch(_gate, num_tokens, triton.cdiv(size, _GATED))(
            out, x, gate, size, x.stride(0), gate.stride(0), BY=GATES.index(by), BLOCK=_GATED, OVERLAP=ahead,
            launch_pdl=ahead,
        )  # fmt: skip
        return out


def _short(seqs: SSMSequences, *, tokenwise: bool) -> tuple[Tensor, int, bool]:
    """Return the indices of the sequences that the kernels for short ones process, their number, and whether
    these are all sequences of the batch: if all are short, or with `tokenwise`, by which longer ones are
    processed token by token, too. The kernels do not read the indices of all sequences, so any tensor is
    returned then."""
    if seqs.short or tokenwise:
        return seqs.rows, len(seqs.lens), True
    assert seqs.split.short is not None
    return seqs.split.short, seqs.split.num_short, False


def _channels_per_warp(num_channels: int) -> int:
    """Return the channels per warp, fewer if `num_channels` of all sequences would not fill enough warps."""
    return _BLOCKS[sum(num_channels >= most for most in _MOST_CHANNELS)]


def _pack_bc(b: Tensor, c: Tensor) -> Tensor:
    """Return B and C [T, size] as one [T, 2, power of two] float32, because every program reads all."""
    (num_tokens, size), padded = b.shape, triton.next_power_of_2(max(b.shape[1], 4))
    make = torch.empty if padded == size else torch.zeros
    bc = make(num_tokens, 2, padded, dtype=torch.float32, device=b.device)
    bc[:, 0, :size], bc[:, 1, :size] = b, c
    return bc


def _tile(num_heads: int, dim: int, other: int) -> int:
    """Return the number of elements of dimension `dim` of a head's state that a program processes for short
    sequences, with all elements of its other dimension, of size `other`."""
    small = num_heads <= _FEW and not batch_invariant.is_on()
    limit = (_SMALL if small else _TILE) // other
    return max(min(int(triton.next_power_of_2(dim)), limit), 1)


def _dot_options(dtype: torch.dtype, shape: SSMShape) -> dict[str, str | int]:
    """Return precision and compile options of tl.dot. float32 uses tf32x3, since IEEE takes minutes to
    compile, and a single stage, since its tiles are large."""
    wide = dtype == torch.float32
    return {
        "PRECISION": "tf32x3" if wide else "tf32",
        "num_warps": shape.warps,
        "num_stages": 1 if wide else shape.stages,
    }
