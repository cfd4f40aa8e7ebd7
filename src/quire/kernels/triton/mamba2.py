"""Short convolutions and the Mamba-2 scan: kernels for single tokens, and others for longer sequences."""

import triton
import triton.language as tl

from quire.kernels.triton.launch import follow


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return x / (1 + tl.exp(-x))


@triton.jit
def silu_if(x: tl.tensor, ACTIVATED: tl.constexpr) -> tl.tensor:
    if ACTIVATED:
        x = silu(x)
    return x


@triton.jit
def place_of(
    numbers: tl.tensor, starts: tl.tensor, rows: tl.tensor, positions: tl.tensor, ALL: tl.constexpr
) -> tl.tensor:
    """Return first token, end, row and position of this program's sequence; at position 0 it has no state."""
    seq = tl.program_id(0)
    if not ALL:
        seq = tl.load(numbers + seq)
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    return first, end, tl.load(rows + seq).to(tl.int64), tl.load(positions + first)


@triton.jit
def decays(since: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the decay from token j to i >= j [CHUNK, CHUNK], from cumulative log decays [CHUNK]."""
    gaps = since[:, None] - since[None, :]
    return tl.exp(tl.where(at[:, None] >= at[None, :], gaps, float("-inf")))


@triton.jit
def conv_single(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    numbers: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    KERNEL: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Compute the convolution of a single token and update its state. Each channel belongs to one thread.
    Grid: (sequences, channels / BLOCK)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    last = tl.load(weight + channel * KERNEL + KERNEL - 1, mask=exists, other=0.0).to(tl.float32)
    follow(OVERLAP)
    token, _, row, position = place_of(numbers, starts, rows, positions, ALL)
    new = tl.load(x + token.to(tl.int64) * stride + channel, mask=exists, other=0.0)
    total = new.to(tl.float32) * last
    state_at = state + (row * channels + channel) * (KERNEL - 1)
    has_state = exists & (position + 0 * channel > 0)
    for i in tl.static_range(KERNEL - 1):
        past = tl.load(state_at + i, mask=has_state, other=0.0)
        total += past.to(tl.float32) * tl.load(weight + channel * KERNEL + i, mask=exists, other=0.0)
        if i > 0:
            tl.store(state_at + i - 1, past, mask=exists)
    tl.store(state_at + KERNEL - 2, new, mask=exists)
    if BIASED:
        total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    at = out + token.to(tl.int64) * channels + channel
    tl.store(at, silu_if(total, ACTIVATED).to(out.dtype.element_ty), mask=exists)


@triton.jit
def load_input(
    x: tl.tensor,
    state: tl.tensor,
    start: tl.tensor,
    at: tl.tensor,
    stride: tl.tensor,
    exists: tl.tensor,
    has_state: tl.tensor,
    KERNEL: tl.constexpr,
) -> tl.tensor:
    """Load a sequence's inputs at token `at` of this batch, or for -1, -2 .. from its state. Tokens before
    the state have no weight."""
    if at >= 0:
        inputs = tl.load(x + (start + at) * stride, mask=exists, other=0.0)
    else:
        inputs = tl.load(state + max(at + KERNEL - 1, 0), mask=has_state, other=0.0)
    return inputs.to(tl.float32)


@triton.jit
def conv_chunks(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    chunks: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    KERNEL: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the convolution of a chunk, four tokens at a time, so that each input is read once. KERNEL <=
    4. States are only read. Grid: (chunks, channels / BLOCK)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, zero = channel < channels, 0 * channel
    seq, first = tl.load(chunks + 2 * tl.program_id(0)), tl.load(chunks + 2 * tl.program_id(0) + 1)
    start, end = tl.load(starts + seq).to(tl.int64), tl.load(starts + seq + 1).to(tl.int64)
    has_state = exists & (tl.load(positions + start + zero) > 0)
    state_at = state + (tl.load(rows + seq).to(tl.int64) * channels + channel) * (KERNEL - 1)
    taps = weight + channel * KERNEL + KERNEL - 4
    w0 = tl.load(taps, mask=exists & (zero + KERNEL > 3), other=0.0).to(tl.float32)
    w1 = tl.load(taps + 1, mask=exists & (zero + KERNEL > 2), other=0.0).to(tl.float32)
    w2 = tl.load(taps + 2, mask=exists & (zero + KERNEL > 1), other=0.0).to(tl.float32)
    w3 = tl.load(taps + 3, mask=exists, other=0.0).to(tl.float32)
    added = tl.zeros((BLOCK,), tl.float32)
    if BIASED:
        added = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    x += channel
    out += channel
    a = load_input(x, state_at, start, first - 3, stride, exists, has_state, KERNEL)
    b = load_input(x, state_at, start, first - 2, stride, exists, has_state, KERNEL)
    c = load_input(x, state_at, start, first - 1, stride, exists, has_state, KERNEL)
    kind = out.dtype.element_ty
    for at in range(start + first, min(start + first + CHUNK, end), 4):
        d = tl.load(x + at * stride, mask=exists, other=0.0).to(tl.float32)
        e = tl.load(x + (at + 1) * stride, mask=exists & (zero + at + 1 < end), other=0.0).to(tl.float32)
        f = tl.load(x + (at + 2) * stride, mask=exists & (zero + at + 2 < end), other=0.0).to(tl.float32)
        g = tl.load(x + (at + 3) * stride, mask=exists & (zero + at + 3 < end), other=0.0).to(tl.float32)
        y = silu_if(added + a * w0 + b * w1 + c * w2 + d * w3, ACTIVATED)
        tl.store(out + at * channels, y.to(kind), mask=exists)
        y = silu_if(added + b * w0 + c * w1 + d * w2 + e * w3, ACTIVATED)
        tl.store(out + (at + 1) * channels, y.to(kind), mask=exists & (zero + at + 1 < end))
        y = silu_if(added + c * w0 + d * w1 + e * w2 + f * w3, ACTIVATED)
        tl.store(out + (at + 2) * channels, y.to(kind), mask=exists & (zero + at + 2 < end))
        y = silu_if(added + d * w0 + e * w1 + f * w2 + g * w3, ACTIVATED)
        tl.store(out + (at + 3) * channels, y.to(kind), mask=exists & (zero + at + 3 < end))
        a, b, c = e, f, g


@triton.jit
def conv_keep(
    x: tl.tensor,
    state: tl.tensor,
    numbers: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the last inputs of longer sequences as their state. Grid: (longer sequences, channels /
    BLOCK)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    first, end, row, position = place_of(numbers, starts, rows, positions, False)
    state_at = state + (row * channels + channel) * (KERNEL - 1)
    has_state = exists & (position + 0 * channel > 0)
    for i in tl.static_range(KERNEL - 1):
        token = end - (KERNEL - 1) + i
        if token >= first:
            new = tl.load(x + token.to(tl.int64) * stride + channel, mask=exists, other=0.0)
        else:
            new = tl.load(state_at + i + (end - first), mask=has_state, other=0.0)
        tl.store(state_at + i, new, mask=exists)


@triton.jit
def scan_single(
    out: tl.tensor,
    xbc: tl.tensor,
    dt: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    skip: tl.tensor,
    state: tl.tensor,
    numbers: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    stride: tl.tensor,
    dt_stride: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Update the state of one head with a single token and compute its output. Grid: (sequences, heads,
    head_dim / BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_SIZE)
    exists = (dim < DIM)[:, None] & (n < SIZE)[None, :]
    follow(OVERLAP)
    token, _, row, position = place_of(numbers, starts, rows, positions, ALL)
    state_at = state + (row * HEADS + head) * (DIM * SIZE) + dim[:, None] * SIZE + n[None, :]
    h = tl.load(state_at, mask=exists & (position + 0 * n > 0)[None, :], other=0.0)
    inputs = xbc + token.to(tl.int64) * stride
    x = tl.load(inputs + head * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    b_at = inputs + HEADS * DIM + head // (HEADS // GROUPS) * SIZE + n
    b = tl.load(b_at, mask=n < SIZE, other=0.0).to(tl.float32)
    c = tl.load(b_at + GROUPS * SIZE, mask=n < SIZE, other=0.0).to(tl.float32)
    step = tl.load(dt + token.to(tl.int64) * dt_stride + head).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + tl.load(bias + head)), least), most)
    h = h * tl.exp(step * tl.load(rate + head)) + (x * step)[:, None] * b[None, :]
    tl.store(state_at, h, mask=exists)
    y = tl.sum(h * c[None, :], 1) + x * tl.load(skip + head)
    at = out + token.to(tl.int64) * (HEADS * DIM) + head * DIM + dim
    tl.store(at, y.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def scan_chunks(
    out: tl.tensor,
    xbc: tl.tensor,
    dt: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    skip: tl.tensor,
    state: tl.tensor,
    numbers: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    stride: tl.tensor,
    dt_stride: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Scan chunk by chunk with the state in registers. Grid: (longer sequences, heads, head_dim /
    BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n, i = tl.arange(0, BLOCK_SIZE), tl.arange(0, CHUNK)
    exists = (dim < DIM)[:, None] & (n < SIZE)[None, :]
    start, end, row, position = place_of(numbers, starts, rows, positions, False)
    state_at = state + (row * HEADS + head) * (DIM * SIZE) + dim[:, None] * SIZE + n[None, :]
    h = tl.load(state_at, mask=exists & (position + 0 * n > 0)[None, :], other=0.0)
    head_rate, head_bias, head_skip = tl.load(rate + head), tl.load(bias + head), tl.load(skip + head)
    kind = xbc.dtype.element_ty
    for first in range(start, end, CHUNK):
        token, live = (first + i).to(tl.int64), first + i < end
        inputs = xbc + token[:, None] * stride
        x_live, n_live = live[:, None] & (dim < DIM)[None, :], live[:, None] & (n < SIZE)[None, :]
        x = tl.load(inputs + head * DIM + dim[None, :], mask=x_live, other=0.0)
        b_at = inputs + HEADS * DIM + head // (HEADS // GROUPS) * SIZE + n[None, :]
        b = tl.load(b_at, mask=n_live, other=0.0)
        c = tl.load(b_at + GROUPS * SIZE, mask=n_live, other=0.0)
        step = tl.load(dt + token * dt_stride + head, mask=live, other=0.0).to(tl.float32)
        step = tl.where(live, tl.minimum(tl.maximum(softplus(step + head_bias), least), most), 0.0)
        since, total = tl.cumsum(step * head_rate, 0), tl.sum(step * head_rate, 0)
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * decays(since, i) * step[None, :]
        y = tl.dot(scores.to(kind), x, input_precision=PRECISION)
        y += tl.dot(c, tl.trans(h.to(kind)), input_precision=PRECISION) * tl.exp(since)[:, None]
        y += x.to(tl.float32) * head_skip
        at = out + token[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
        tl.store(at, y.to(kind), mask=x_live)
        inputs_at_end = (x.to(tl.float32) * (step * tl.exp(total - since))[:, None]).to(kind)
        h = h * tl.exp(total) + tl.dot(tl.trans(inputs_at_end), b, input_precision=PRECISION)
    tl.store(state_at, h, mask=exists)
