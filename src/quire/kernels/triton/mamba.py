"""The scan of Mamba: a kernel for single tokens, another for more of a sequence."""

import triton
import triton.language as tl

from quire.kernels.triton.launch import follow
from quire.kernels.triton.mamba2 import place_of, silu, softplus

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def select_single(
    out: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    dt: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    skip: tl.tensor,
    state: tl.tensor,
    numbers: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    dt_stride: tl.tensor,
    bc_stride: tl.tensor,
    SIZE: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (sequences, channels / BLOCK)."""
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    live, known = channel < channels, n < SIZE
    exist = live[:, None] & known[None, :]
    places = channel[:, None] * SIZE + n[None, :]
    own_rate = tl.load(rate + places, mask=exist, other=0.0)
    own_bias = tl.load(bias + channel, mask=live, other=0.0)
    own_skip = tl.load(skip + channel, mask=live, other=0.0)
    follow(OVERLAP)
    first, _, row, position = place_of(numbers, starts, rows, positions, ALL)
    token = first.to(tl.int64)
    kept = state + row * channels * SIZE + places
    h = tl.load(kept, mask=exist & (position + 0 * n > 0)[None, :], other=0.0)
    taken = tl.load(x + token * x_stride + channel, mask=live, other=0.0).to(tl.float32)
    factor = tl.load(gate + token * gate_stride + channel, mask=live, other=0.0).to(tl.float32)
    wait = tl.load(dt + token * dt_stride + channel, mask=live, other=0.0).to(tl.float32)
    into = tl.load(b + token * bc_stride + n, mask=known, other=0.0).to(tl.float32)
    seen = tl.load(c + token * bc_stride + n, mask=known, other=0.0).to(tl.float32)
    wait = softplus(wait + own_bias)
    h = h * tl.exp(wait[:, None] * own_rate) + (wait * taken)[:, None] * into[None, :]
    tl.store(kept, h, mask=exist)
    y = (tl.sum(h * seen[None, :], 1) + own_skip * taken) * silu(factor)
    tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def quarters(at: tl.tensor, live: tl.tensor, QUARTER: tl.constexpr) -> tl.tensor:
    """Four tensors, each with a quarter of a state's numbers."""
    return (
        tl.load(at, mask=live),
        tl.load(at + QUARTER, mask=live),
        tl.load(at + 2 * QUARTER, mask=live),
        tl.load(at + 3 * QUARTER, mask=live),
    )


@triton.jit
def of_states(
    at: tl.tensor, n: tl.tensor, live: tl.tensor, SIZE: tl.constexpr, QUARTER: tl.constexpr
) -> tl.tensor:
    """The same where zeros stand for what does not exist; `n` are the places of the first quarter."""
    return (
        tl.load(at, mask=live & (n < SIZE), other=0.0),
        tl.load(at + QUARTER, mask=live & (n < SIZE - QUARTER), other=0.0),
        tl.load(at + 2 * QUARTER, mask=live & (n < SIZE - 2 * QUARTER), other=0.0),
        tl.load(at + 3 * QUARTER, mask=live & (n < SIZE - 3 * QUARTER), other=0.0),
    )


@triton.jit
def keep_states(
    at: tl.tensor,
    h: tl.tensor,
    n: tl.tensor,
    live: tl.tensor,
    SIZE: tl.constexpr,
    QUARTER: tl.constexpr,
) -> tl.tensor:
    tl.store(at, h[0], mask=live & (n < SIZE))
    tl.store(at + QUARTER, h[1], mask=live & (n < SIZE - QUARTER))
    tl.store(at + 2 * QUARTER, h[2], mask=live & (n < SIZE - 2 * QUARTER))
    tl.store(at + 3 * QUARTER, h[3], mask=live & (n < SIZE - 3 * QUARTER))


@triton.jit
def arriving(
    inputs: tl.tensor,
    first: tl.tensor,
    live: tl.tensor,
    known: tl.tensor,
    AFTER: tl.constexpr,
    STRIDES: tl.constexpr,
    QUARTER: tl.constexpr,
) -> tl.tensor:
    """What comes in for a token, so many after the first; nothing is said of what does not exist."""
    x, gate, dt, given = inputs
    b = given + first * (8 * QUARTER) + AFTER * (8 * QUARTER)
    return (
        tl.load(x + first * STRIDES[0] + AFTER * STRIDES[0], mask=live),
        tl.load(gate + first * STRIDES[1] + AFTER * STRIDES[1], mask=live),
        tl.load(dt + first * STRIDES[2] + AFTER * STRIDES[2], mask=live),
        quarters(b, known, QUARTER),
        quarters(b + 4 * QUARTER, known, QUARTER),
    )


@triton.jit
def four_arriving(
    inputs: tl.tensor,
    first: tl.tensor,
    live: tl.tensor,
    known: tl.tensor,
    STRIDES: tl.constexpr,
    QUARTER: tl.constexpr,
) -> tl.tensor:
    return (
        arriving(inputs, first, live, known, 0, STRIDES, QUARTER),
        arriving(inputs, first, live, known, 1, STRIDES, QUARTER),
        arriving(inputs, first, live, known, 2, STRIDES, QUARTER),
        arriving(inputs, first, live, known, 3, STRIDES, QUARTER),
    )


@triton.jit
def kept_of(h: tl.tensor, wait: tl.tensor, rate: tl.tensor, taken: tl.tensor, b: tl.tensor) -> tl.tensor:
    return h * tl.exp2((wait * LOG2_E)[:, None] * rate) + taken[:, None] * b[None, :]


@triton.jit
def token_on(h: tl.tensor, rate: tl.tensor, came: tl.tensor, bias: tl.tensor, skip: tl.tensor) -> tl.tensor:
    """The state behind a token, and what comes out."""
    x, gate, dt, b, c = came
    x = x.to(tl.float32)
    wait = softplus(dt.to(tl.float32) + bias)
    h0 = kept_of(h[0], wait, rate[0], wait * x, b[0])
    h1 = kept_of(h[1], wait, rate[1], wait * x, b[1])
    h2 = kept_of(h[2], wait, rate[2], wait * x, b[2])
    h3 = kept_of(h[3], wait, rate[3], wait * x, b[3])
    y = h0 * c[0][None, :]
    y += h1 * c[1][None, :]
    y += h2 * c[2][None, :]
    y += h3 * c[3][None, :]
    return (h0, h1, h2, h3), (tl.sum(y, 1) + skip * x) * silu(gate.to(tl.float32))


@triton.jit
def select_tokens(
    out: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    dt: tl.tensor,
    given: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    skip: tl.tensor,
    state: tl.tensor,
    numbers: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    CHANNELS: tl.constexpr,
    STRIDES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUARTER: tl.constexpr,
) -> None:
    """Grid (longer sequences, channels / BLOCK): token after token, the state at hand. Four tokens are
    computed while the next four are on their way. `given` is [T, 2, 4 * QUARTER] float32, B and C.

    A state lies in quarters so that a thread has all numbers of a channel, or every so many: their sum is
    its own, and little is computed by several threads.
    """
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, QUARTER)
    live, known = channel < CHANNELS, n[None, :]
    places = channel[:, None] * SIZE + known
    own_rate = of_states(rate + places, known, live[:, None], SIZE, QUARTER)
    own_bias = tl.load(bias + channel, mask=live, other=0.0)
    own_skip = tl.load(skip + channel, mask=live, other=0.0)
    first, end, row, position = place_of(numbers, starts, rows, positions, False)
    kept = state + row * CHANNELS * SIZE + places
    h = of_states(kept, known, (live & (position + 0 * channel > 0))[:, None], SIZE, QUARTER)
    inputs = (x + channel, gate + channel, dt + channel, given + n)
    out += channel
    kind = out.dtype.element_ty
    first = first.to(tl.int64)
    rest, whole = first + (end - first) // 4 * 4, n < QUARTER
    there, given_there = live & (rest + 0 * channel > first), rest + 0 * n > first
    came = four_arriving(inputs, first, there, given_there, STRIDES, QUARTER)
    for at in range(first, rest, 4):
        coming = four_arriving(inputs, tl.minimum(at + 4, rest - 4), live, whole, STRIDES, QUARTER)
        h, a = token_on(h, own_rate, came[0], own_bias, own_skip)
        h, b = token_on(h, own_rate, came[1], own_bias, own_skip)
        h, c = token_on(h, own_rate, came[2], own_bias, own_skip)
        h, d = token_on(h, own_rate, came[3], own_bias, own_skip)
        tl.store(out + at * CHANNELS, a.to(kind), mask=live)
        tl.store(out + at * CHANNELS + CHANNELS, b.to(kind), mask=live)
        tl.store(out + at * CHANNELS + 2 * CHANNELS, c.to(kind), mask=live)
        tl.store(out + at * CHANNELS + 3 * CHANNELS, d.to(kind), mask=live)
        came = coming
    for at in range(rest, end):
        one = arriving(inputs, at, live, whole, 0, STRIDES, QUARTER)
        h, y = token_on(h, own_rate, one, own_bias, own_skip)
        tl.store(out + at * CHANNELS, y.to(kind), mask=live)
    keep_states(kept, h, known, live[:, None], SIZE, QUARTER)
