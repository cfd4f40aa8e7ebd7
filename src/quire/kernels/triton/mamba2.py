"""Short convolutions and the Mamba-2 scan: kernels for short sequences, and others for longer ones.

Short sequences have at most STATES tokens, the number of states of a row: a single token, possibly with draft
tokens after it. The state after each of their tokens is kept. With TOKENWISE the kernels for short sequences
also process longer ones, and keep their last state: the same additions in any chunk of a prompt, and slower.
"""

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
    """Return for this program's sequence: its first token in the batch, the end of its tokens, its row, and
    the position of its first token. At position 0 it has no state yet. Its index is read from `numbers`,
    unless ALL sequences of the batch are processed."""
    seq = tl.program_id(0)
    if not ALL:
        seq = tl.load(numbers + seq)
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    return first, end, tl.load(rows + seq).to(tl.int64), tl.load(positions + first)


@triton.jit
def state_after(row: tl.tensor, num_tokens: tl.tensor, STATES: tl.constexpr) -> tl.tensor:
    """Return the index of the state of a row's sequence after its first `num_tokens` tokens."""
    return row * STATES + num_tokens % STATES


@triton.jit
def count_of(
    first: tl.tensor, end: tl.tensor, STATES: tl.constexpr, TOKENWISE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the number of tokens of a sequence. It is the compile-time constant 1, which removes the loop
    over tokens, if short sequences have a single token."""
    count = end - first
    if STATES == 1 and not TOKENWISE:
        count = 1
    return count


@triton.jit
def is_kept(at: tl.tensor, count: tl.tensor, STATES: tl.constexpr) -> tl.tensor:
    """Whether the state after token `at` of a sequence of `count` tokens is stored: after each token of a
    short sequence, otherwise only after the last."""
    return (at + 1 == count) | (count + 0 * at <= STATES)


@triton.jit
def decays(since: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the decay from token j to i >= j [CHUNK, CHUNK], from cumulative log decays [CHUNK]."""
    gaps = since[:, None] - since[None, :]
    return tl.exp(tl.where(at[:, None] >= at[None, :], gaps, float("-inf")))


@triton.jit
def load_input(
    x: tl.tensor, state: tl.tensor, start: tl.tensor, at: tl.tensor, stride: tl.tensor, exists: tl.tensor,
    has_state: tl.tensor,
    KERNEL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the inputs of a sequence at its token `at` of this batch; tokens -1, -2 ... are loaded from its
    state. Results for tokens before those in the state are arbitrary; their weight is 0."""
    if at >= 0:
        inputs = tl.load(x + (start + at) * stride, mask=exists, other=0.0)
    else:
        inputs = tl.load(state + max(at + KERNEL - 1, 0), mask=has_state, other=0.0)
    return inputs.to(tl.float32)


@triton.jit
def conv_short(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, bias: tl.tensor, state: tl.tensor, numbers: tl.tensor,
    starts: tl.tensor, rows: tl.tensor, positions: tl.tensor, channels: tl.tensor, stride: tl.tensor,
    KERNEL: tl.constexpr, BIASED: tl.constexpr, ACTIVATED: tl.constexpr, ALL: tl.constexpr,
    STATES: tl.constexpr, TOKENWISE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the convolution of a short sequence, and store the state after each token. One thread computes
    a channel and reads its state before it overwrites it. The order of the sum is that of `conv_chunks`.
    Grid: (sequences, channels / BLOCK)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    taps = weight + channel * KERNEL
    last = tl.load(taps + KERNEL - 1, mask=exists, other=0.0).to(tl.float32)
    follow(OVERLAP)
    first, end, row, position = place_of(numbers, starts, rows, positions, ALL)
    start, has_state = first.to(tl.int64), exists & (position + 0 * channel > 0)
    before = state + (state_after(row, position, STATES) * channels + channel) * (KERNEL - 1)
    added = tl.zeros((BLOCK,), tl.float32)
    if BIASED:
        added = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    count = count_of(first, end, STATES, TOKENWISE)
    for at in range(0, count):
        kept = exists & is_kept(at + 0 * channel, count, STATES)
        into = state + (state_after(row, position + at + 1, STATES) * channels + channel) * (KERNEL - 1)
        new = tl.load(x + (start + at) * stride + channel, mask=exists, other=0.0)
        total = added
        for i in tl.static_range(KERNEL - 1):
            past = load_input(
                x + channel, before, start, at + i - (KERNEL - 1), stride, exists, has_state, KERNEL
            )
            total += past * tl.load(taps + i, mask=exists, other=0.0)
            if i > 0:
                tl.store(into + i - 1, past.to(new.dtype), mask=kept)
        tl.store(into + KERNEL - 2, new, mask=kept)
        total += new.to(tl.float32) * last
        kind = out.dtype.element_ty
        tl.store(out + (start + at) * channels + channel, silu_if(total, ACTIVATED).to(kind), mask=exists)


@triton.jit
def conv_chunks(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, bias: tl.tensor, state: tl.tensor, chunks: tl.tensor,
    starts: tl.tensor, rows: tl.tensor, positions: tl.tensor, channels: tl.tensor, stride: tl.tensor,
    KERNEL: tl.constexpr, BIASED: tl.constexpr, ACTIVATED: tl.constexpr, STATES: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the convolution of a chunk of a longer sequence, four tokens at a time, so that each input is
    read once. KERNEL is at most 4. States are not written. Grid: (chunks, channels / BLOCK)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, zero = channel < channels, 0 * channel
    seq, first = tl.load(chunks + 2 * tl.program_id(0)), tl.load(chunks + 2 * tl.program_id(0) + 1)
    start, end = tl.load(starts + seq).to(tl.int64), tl.load(starts + seq + 1).to(tl.int64)
    has_state = exists & (tl.load(positions + start + zero) > 0)
    before = state_after(tl.load(rows + seq).to(tl.int64), tl.load(positions + start), STATES)
    state_at = state + (before * channels + channel) * (KERNEL - 1)
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
    x: tl.tensor, state: tl.tensor, numbers: tl.tensor, starts: tl.tensor, rows: tl.tensor,
    positions: tl.tensor, channels: tl.tensor, stride: tl.tensor,
    KERNEL: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the last KERNEL - 1 inputs of a longer sequence as its state of the convolution. Grid: (longer
    sequences, channels / BLOCK)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    first, end, row, position = place_of(numbers, starts, rows, positions, False)
    before = state + (state_after(row, position, STATES) * channels + channel) * (KERNEL - 1)
    into = state + (state_after(row, position + end - first, STATES) * channels + channel) * (KERNEL - 1)
    has_state = exists & (position + 0 * channel > 0)
    for i in tl.static_range(KERNEL - 1):
        token = end - (KERNEL - 1) + i
        if token >= first:
            new = tl.load(x + token.to(tl.int64) * stride + channel, mask=exists, other=0.0)
        else:
            new = tl.load(before + i + (end - first), mask=has_state, other=0.0)
        tl.store(into + i, new, mask=exists)


@triton.jit
def scan_short(
    out: tl.tensor, xbc: tl.tensor, dt: tl.tensor, rate: tl.tensor, bias: tl.tensor, skip: tl.tensor,
    state: tl.tensor, numbers: tl.tensor, starts: tl.tensor, rows: tl.tensor, positions: tl.tensor,
    stride: tl.tensor, dt_stride: tl.tensor, least: tl.tensor, most: tl.tensor,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, ALL: tl.constexpr,
    STATES: tl.constexpr, TOKENWISE: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute Mamba-2's scan of a short sequence for one head, and store the state after each token. Shapes
    are those of `StateReference.scan`. Grid: (sequences, heads, head_dim / BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_SIZE)
    exists = (dim < DIM)[:, None] & (n < SIZE)[None, :]
    follow(OVERLAP)
    first, end, row, position = place_of(numbers, starts, rows, positions, ALL)
    states = state + head * (DIM * SIZE) + dim[:, None] * SIZE + n[None, :]
    before = states + state_after(row, position, STATES) * (HEADS * DIM * SIZE)
    h = tl.load(before, mask=exists & (position + 0 * n > 0)[None, :], other=0.0)
    count = count_of(first, end, STATES, TOKENWISE)
    for at in range(0, count):
        token = (first + at).to(tl.int64)
        inputs = xbc + token * stride
        x = tl.load(inputs + head * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        b_at = inputs + HEADS * DIM + head // (HEADS // GROUPS) * SIZE + n
        b = tl.load(b_at, mask=n < SIZE, other=0.0).to(tl.float32)
        c = tl.load(b_at + GROUPS * SIZE, mask=n < SIZE, other=0.0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + head).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step + tl.load(bias + head)), least), most)
        h = h * tl.exp(step * tl.load(rate + head)) + (x * step)[:, None] * b[None, :]
        into = states + state_after(row, position + at + 1, STATES) * (HEADS * DIM * SIZE)
        tl.store(into, h, mask=exists & is_kept(at + 0 * n, count, STATES)[None, :])
        y = tl.sum(h * c[None, :], 1) + x * tl.load(skip + head)
        out_at = out + token * (HEADS * DIM) + head * DIM + dim
        tl.store(out_at, y.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def scan_chunks(
    out: tl.tensor, xbc: tl.tensor, dt: tl.tensor, rate: tl.tensor, bias: tl.tensor, skip: tl.tensor,
    state: tl.tensor, numbers: tl.tensor, starts: tl.tensor, rows: tl.tensor, positions: tl.tensor,
    stride: tl.tensor, dt_stride: tl.tensor, least: tl.tensor, most: tl.tensor,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, STATES: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute Mamba-2's scan of a longer sequence for one head, CHUNK tokens at a time, with the state in
    registers. Shapes are as in `StateReference.scan`. Grid: (sequences, heads, head_dim / BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n, i = tl.arange(0, BLOCK_SIZE), tl.arange(0, CHUNK)
    exists = (dim < DIM)[:, None] & (n < SIZE)[None, :]
    start, end, row, position = place_of(numbers, starts, rows, positions, False)
    states = state + head * (DIM * SIZE) + dim[:, None] * SIZE + n[None, :]
    before = states + state_after(row, position, STATES) * (HEADS * DIM * SIZE)
    h = tl.load(before, mask=exists & (position + 0 * n > 0)[None, :], other=0.0)
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
    into = states + state_after(row, position + end - start, STATES) * (HEADS * DIM * SIZE)
    tl.store(into, h, mask=exists)
