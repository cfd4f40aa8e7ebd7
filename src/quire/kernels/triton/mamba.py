"""Mamba selective scan: a kernel for short sequences (see `mamba2.py`), and one for longer ones."""

import triton
import triton.language as tl

from quire.kernels.triton.launch import follow
from quire.kernels.triton.mamba2 import count_of, is_kept, place_of, silu, softplus, state_after

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def select_short(
    out: tl.tensor, x: tl.tensor, gate: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, rate: tl.tensor,
    bias: tl.tensor, skip: tl.tensor, state: tl.tensor, numbers: tl.tensor, starts: tl.tensor,
    rows: tl.tensor, positions: tl.tensor, channels: tl.tensor, x_stride: tl.tensor, gate_stride: tl.tensor,
    dt_stride: tl.tensor, bc_stride: tl.tensor,
    SIZE: tl.constexpr, ALL: tl.constexpr, STATES: tl.constexpr, TOKENWISE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Update the states of BLOCK channels with each token of a short sequence and compute the outputs.
    Tensors have the shapes of `StateReference.select`. Grid: (sequences, channels / BLOCK)."""
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    live, valid = channel < channels, n < SIZE
    exists = live[:, None] & valid[None, :]
    places = channel[:, None] * SIZE + n[None, :]
    rates = tl.load(rate + places, mask=exists, other=0.0)
    biases = tl.load(bias + channel, mask=live, other=0.0)
    skips = tl.load(skip + channel, mask=live, other=0.0)
    follow(OVERLAP)
    first, end, row, position = place_of(numbers, starts, rows, positions, ALL)
    before = state + state_after(row, position, STATES) * channels * SIZE + places
    h = tl.load(before, mask=exists & (position + 0 * n > 0)[None, :], other=0.0)
    count = count_of(first, end, STATES, TOKENWISE)
    for at in range(0, count):
        token = (first + at).to(tl.int64)
        inputs = tl.load(x + token * x_stride + channel, mask=live, other=0.0).to(tl.float32)
        factor = tl.load(gate + token * gate_stride + channel, mask=live, other=0.0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + channel, mask=live, other=0.0).to(tl.float32)
        b_row = tl.load(b + token * bc_stride + n, mask=valid, other=0.0).to(tl.float32)
        c_row = tl.load(c + token * bc_stride + n, mask=valid, other=0.0).to(tl.float32)
        step = softplus(step + biases)
        h = h * tl.exp(step[:, None] * rates) + (step * inputs)[:, None] * b_row[None, :]
        into = state + state_after(row, position + at + 1, STATES) * channels * SIZE + places
        tl.store(into, h, mask=exists & is_kept(at + 0 * n, count, STATES)[None, :])
        y = (tl.sum(h * c_row[None, :], 1) + skips * inputs) * silu(factor)
        tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def quarters(at: tl.tensor, live: tl.tensor, QUARTER: tl.constexpr) -> tl.tensor:
    """Load 4 * QUARTER consecutive elements as four tensors."""
    return (
        tl.load(at, mask=live),
        tl.load(at + QUARTER, mask=live),
        tl.load(at + 2 * QUARTER, mask=live),
        tl.load(at + 3 * QUARTER, mask=live),
    )


@triton.jit
def load_states(
    at: tl.tensor, n: tl.tensor, live: tl.tensor, SIZE: tl.constexpr, QUARTER: tl.constexpr
) -> tl.tensor:
    """Load SIZE elements as four quarters, with zeros beyond SIZE; `n` are the first quarter's indices."""
    return (
        tl.load(at, mask=live & (n < SIZE), other=0.0),
        tl.load(at + QUARTER, mask=live & (n < SIZE - QUARTER), other=0.0),
        tl.load(at + 2 * QUARTER, mask=live & (n < SIZE - 2 * QUARTER), other=0.0),
        tl.load(at + 3 * QUARTER, mask=live & (n < SIZE - 3 * QUARTER), other=0.0),
    )


@triton.jit
def store_states(
    at: tl.tensor, h: tl.tensor, n: tl.tensor, live: tl.tensor,
    SIZE: tl.constexpr, QUARTER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    tl.store(at, h[0], mask=live & (n < SIZE))
    tl.store(at + QUARTER, h[1], mask=live & (n < SIZE - QUARTER))
    tl.store(at + 2 * QUARTER, h[2], mask=live & (n < SIZE - 2 * QUARTER))
    tl.store(at + 3 * QUARTER, h[3], mask=live & (n < SIZE - 3 * QUARTER))


@triton.jit
def load_token(
    inputs: tl.tensor, first: tl.tensor, live: tl.tensor, valid: tl.tensor,
    AFTER: tl.constexpr, STRIDES: tl.constexpr, QUARTER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load x, gate, dt, B and C of token `first` + AFTER, where `first` is an index in the batch; masked
    elements are undefined."""
    x, gate, dt, bc = inputs
    b = bc + first * (8 * QUARTER) + AFTER * (8 * QUARTER)
    return (
        tl.load(x + first * STRIDES[0] + AFTER * STRIDES[0], mask=live),
        tl.load(gate + first * STRIDES[1] + AFTER * STRIDES[1], mask=live),
        tl.load(dt + first * STRIDES[2] + AFTER * STRIDES[2], mask=live),
        quarters(b, valid, QUARTER),
        quarters(b + 4 * QUARTER, valid, QUARTER),
    )


@triton.jit
def load_four_tokens(
    inputs: tl.tensor, first: tl.tensor, live: tl.tensor, valid: tl.tensor,
    STRIDES: tl.constexpr, QUARTER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    return (
        load_token(inputs, first, live, valid, 0, STRIDES, QUARTER),
        load_token(inputs, first, live, valid, 1, STRIDES, QUARTER),
        load_token(inputs, first, live, valid, 2, STRIDES, QUARTER),
        load_token(inputs, first, live, valid, 3, STRIDES, QUARTER),
    )


@triton.jit
def next_state(h: tl.tensor, step: tl.tensor, rate: tl.tensor, inputs: tl.tensor, b: tl.tensor) -> tl.tensor:
    return h * tl.exp2((step * LOG2_E)[:, None] * rate) + inputs[:, None] * b[None, :]


@triton.jit
def advance(h: tl.tensor, rate: tl.tensor, loaded: tl.tensor, bias: tl.tensor, skip: tl.tensor) -> tl.tensor:
    """Return the state after a token and the token's output, from the state `h` before it and its inputs
    `loaded` (see `load_token`)."""
    x, gate, dt, b, c = loaded
    x = x.to(tl.float32)
    step = softplus(dt.to(tl.float32) + bias)
    h0 = next_state(h[0], step, rate[0], step * x, b[0])
    h1 = next_state(h[1], step, rate[1], step * x, b[1])
    h2 = next_state(h[2], step, rate[2], step * x, b[2])
    h3 = next_state(h[3], step, rate[3], step * x, b[3])
    y = h0 * c[0][None, :]
    y += h1 * c[1][None, :]
    y += h2 * c[2][None, :]
    y += h3 * c[3][None, :]
    return (h0, h1, h2, h3), (tl.sum(y, 1) + skip * x) * silu(gate.to(tl.float32))


@triton.jit
def select_tokens(
    out: tl.tensor, x: tl.tensor, gate: tl.tensor, dt: tl.tensor, bc: tl.tensor, rate: tl.tensor,
    bias: tl.tensor, skip: tl.tensor, state: tl.tensor, numbers: tl.tensor, starts: tl.tensor,
    rows: tl.tensor, positions: tl.tensor,
    CHANNELS: tl.constexpr, STRIDES: tl.constexpr, SIZE: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, QUARTER: tl.constexpr,
) -> None:  # fmt: skip
    """Compute Mamba's scan of a longer sequence for BLOCK channels, token by token with the state in
    registers. Four tokens are computed while the next four are loaded. `bc` is [T, 2, 4 * QUARTER] float32, B
    and C. Grid: (longer sequences, channels / BLOCK).

    A state is four tensors (quarters), so that a thread has all elements of a channel, or every n-th. Most
    sums then stay within a thread, and few values are computed by several threads.
    """
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, QUARTER)
    live, column = channel < CHANNELS, n[None, :]
    places = channel[:, None] * SIZE + column
    rates = load_states(rate + places, column, live[:, None], SIZE, QUARTER)
    biases = tl.load(bias + channel, mask=live, other=0.0)
    skips = tl.load(skip + channel, mask=live, other=0.0)
    first, end, row, position = place_of(numbers, starts, rows, positions, False)
    before = state + state_after(row, position, STATES) * CHANNELS * SIZE + places
    into = state + state_after(row, position + end - first, STATES) * CHANNELS * SIZE + places
    h = load_states(before, column, (live & (position + 0 * channel > 0))[:, None], SIZE, QUARTER)
    inputs = (x + channel, gate + channel, dt + channel, bc + n)
    out += channel
    kind = out.dtype.element_ty
    first = first.to(tl.int64)
    rest, whole = first + (end - first) // 4 * 4, n < QUARTER
    live_first, bc_first = live & (rest + 0 * channel > first), rest + 0 * n > first
    loaded = load_four_tokens(inputs, first, live_first, bc_first, STRIDES, QUARTER)
    for at in range(first, rest, 4):
        ahead = load_four_tokens(inputs, tl.minimum(at + 4, rest - 4), live, whole, STRIDES, QUARTER)
        h, a = advance(h, rates, loaded[0], biases, skips)
        h, b = advance(h, rates, loaded[1], biases, skips)
        h, c = advance(h, rates, loaded[2], biases, skips)
        h, d = advance(h, rates, loaded[3], biases, skips)
        tl.store(out + at * CHANNELS, a.to(kind), mask=live)
        tl.store(out + at * CHANNELS + CHANNELS, b.to(kind), mask=live)
        tl.store(out + at * CHANNELS + 2 * CHANNELS, c.to(kind), mask=live)
        tl.store(out + at * CHANNELS + 3 * CHANNELS, d.to(kind), mask=live)
        loaded = ahead
    for at in range(rest, end):
        last = load_token(inputs, at, live, whole, 0, STRIDES, QUARTER)
        h, y = advance(h, rates, last, biases, skips)
        tl.store(out + at * CHANNELS, y.to(kind), mask=live)
    store_states(into, h, column, live[:, None], SIZE, QUARTER)
