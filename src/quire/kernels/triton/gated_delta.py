"""Gated delta rule on a GPU: kernels for short sequences, for chunks, and for a decay per key channel.

`delta_short` is for short sequences (see `mamba2.py`). For longer sequences, `delta_solve` solves each chunk,
and `delta_chunks` carries the state from chunk to chunk. `delta_tokens` is for a decay per key channel."""

import triton
import triton.language as tl

from quire.kernels.triton.launch import follow
from quire.kernels.triton.mamba2 import count_of, decays, is_kept, place_of, softplus, state_after


@triton.jit
def inverse_length(x: tl.tensor, eps: tl.constexpr) -> tl.tensor:
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, len(x.shape) - 1) + eps)


@triton.jit
def delta_short(
    out: tl.tensor, qkv: tl.tensor, a: tl.tensor, b: tl.tensor, rate: tl.tensor, bias: tl.tensor,
    state: tl.tensor, numbers: tl.tensor, starts: tl.tensor, rows: tl.tensor, positions: tl.tensor,
    stride: tl.tensor, ab_stride: tl.tensor, scale: tl.tensor, beta_scale: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    ALL: tl.constexpr, STATES: tl.constexpr, TOKENWISE: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Update the state of one head with each token of a short sequence and compute the outputs. Tensors have
    the shapes of `StateReference.delta`. Grid: (sequences, heads, value_dim / BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_KEY)
    exists = (n < KEY_DIM)[:, None] & (dim < DIM)[None, :]
    follow(OVERLAP)
    first, end, row, position = place_of(numbers, starts, rows, positions, ALL)
    states = state + head * (KEY_DIM * DIM) + n[:, None] * DIM + dim[None, :]
    before = states + state_after(row, position, STATES) * (HEADS * KEY_DIM * DIM)
    h = tl.load(before, mask=exists & (position + 0 * n > 0)[:, None], other=0.0)
    count = count_of(first, end, STATES, TOKENWISE)
    for at in range(0, count):
        token = (first + at).to(tl.int64)
        q_at = qkv + token * stride + head // (HEADS // KEY_HEADS) * KEY_DIM + n
        q = tl.load(q_at, mask=n < KEY_DIM, other=0.0).to(tl.float32)
        k = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=n < KEY_DIM, other=0.0).to(tl.float32)
        v_at = qkv + token * stride + 2 * KEY_HEADS * KEY_DIM + head * DIM + dim
        v = tl.load(v_at, mask=dim < DIM, other=0.0).to(tl.float32)
        step = softplus(tl.load(a + token * ab_stride + head).to(tl.float32) + tl.load(bias + head))
        beta = tl.sigmoid(tl.load(b + token * ab_stride + head).to(tl.float32)) * beta_scale
        q *= inverse_length(q, EPS) * scale
        k *= inverse_length(k, EPS)
        h *= tl.exp(step * tl.load(rate + head))
        written = (v - tl.sum(h * k[:, None], 0)) * beta
        h += k[:, None] * written[None, :]
        into = states + state_after(row, position + at + 1, STATES) * (HEADS * KEY_DIM * DIM)
        tl.store(into, h, mask=exists & is_kept(at + 0 * n, count, STATES)[:, None])
        y = tl.sum(h * q[:, None], 0)
        out_at = out + token * (HEADS * DIM) + head * DIM + dim
        tl.store(out_at, y.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def delta_tokens(
    out: tl.tensor, qkv: tl.tensor, a: tl.tensor, b: tl.tensor, rate: tl.tensor, bias: tl.tensor,
    state: tl.tensor, starts: tl.tensor, rows: tl.tensor, positions: tl.tensor, stride: tl.tensor,
    a_stride: tl.tensor, b_stride: tl.tensor, scale: tl.tensor, log_bound: tl.tensor, beta_scale: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr,
    EPS: tl.constexpr, BOUNDED: tl.constexpr, STATES: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the delta rule with a decay per key channel (KDA) to the tokens of a sequence one after the
    other, with the state of one head in registers. Grid: (sequences, heads, value_dim / BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_KEY)
    exists = (n < KEY_DIM)[:, None] & (dim < DIM)[None, :]
    steps_bias = tl.load(bias + head * KEY_DIM + n, mask=n < KEY_DIM, other=0.0)
    head_rate = tl.load(rate + head)
    follow(OVERLAP)
    start, end, row, position = place_of(rows, starts, rows, positions, True)
    states = state + head * (KEY_DIM * DIM) + n[:, None] * DIM + dim[None, :]
    before = states + state_after(row, position, STATES) * (HEADS * KEY_DIM * DIM)
    h = tl.load(before, mask=exists & (position + 0 * n > 0)[:, None], other=0.0)
    origin, count = start.to(tl.int64), end - start
    for at in range(0, count):
        token = origin + at
        q_at = qkv + token * stride + head // (HEADS // KEY_HEADS) * KEY_DIM + n
        q = tl.load(q_at, mask=n < KEY_DIM, other=0.0).to(tl.float32)
        k = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=n < KEY_DIM, other=0.0).to(tl.float32)
        v_at = qkv + token * stride + 2 * KEY_HEADS * KEY_DIM + head * DIM + dim
        v = tl.load(v_at, mask=dim < DIM, other=0.0).to(tl.float32)
        step = tl.load(a + token * a_stride + head * KEY_DIM + n, mask=n < KEY_DIM, other=0.0).to(tl.float32)
        step += steps_bias
        log_decay = log_bound * tl.sigmoid(-head_rate * step) if BOUNDED else softplus(step) * head_rate
        beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32)) * beta_scale
        q *= inverse_length(q, EPS) * scale
        k *= inverse_length(k, EPS)
        h *= tl.exp(log_decay)[:, None]
        written = (v - tl.sum(h * k[:, None], 0)) * beta
        h += k[:, None] * written[None, :]
        y = tl.sum(h * q[:, None], 0)
        out_at = out + token * (HEADS * DIM) + head * DIM + dim
        tl.store(out_at, y.to(out.dtype.element_ty), mask=dim < DIM)
        into = states + state_after(row, position + at + 1, STATES) * (HEADS * KEY_DIM * DIM)
        tl.store(into, h, mask=exists & is_kept(at + 0 * n, count, STATES)[:, None])


@triton.jit
def log_decays(
    a: tl.tensor, token: tl.tensor, stride: tl.tensor, head: tl.tensor, live: tl.tensor, rate: tl.tensor,
    bias: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the log decay of a head's state at each `token` [CHUNK] of a chunk; 0 if it is not `live`."""
    step = tl.load(a + token * stride + head, mask=live, other=0.0).to(tl.float32)
    return tl.where(live, softplus(step + tl.load(bias + head)) * tl.load(rate + head), 0.0)


@triton.jit
def inverse(system: tl.tensor, i: tl.tensor, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Return the inverse of 1 + `system`, a strictly lower triangular matrix. Inverses of diagonal blocks are
    computed level by level, from blocks of half the size. The lower left of an inverse is -(inverse of the
    lower right) (lower left) (inverse of the upper left)."""
    result = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        whole = (i[:, None] >> (level + 1)) == (i[None, :] >> (level + 1))
        corner = tl.where(whole & ((i[:, None] >> level) != (i[None, :] >> level)), system, 0.0)
        if level > 0:
            corner = tl.dot(result, corner, input_precision=PRECISION)
            corner = tl.dot(corner, result, input_precision=PRECISION)
        result -= corner
    return result


@triton.jit
def delta_solve(
    by_key: tl.tensor, by_value: tl.tensor, qkv: tl.tensor, a: tl.tensor, b: tl.tensor, rate: tl.tensor,
    bias: tl.tensor, chunks: tl.tensor, starts: tl.tensor, stride: tl.tensor, ab_stride: tl.tensor,
    beta_scale: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute `by_key` [T, heads, key_dim] and `by_value` [T, heads, value_dim] of one chunk. The tokens of
    the chunk write `by_value` - `by_key` h, where h is the state before the chunk. Grid: (chunks, heads)."""
    head = tl.program_id(1)
    n, dim, i = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_DIM), tl.arange(0, CHUNK)
    seq, first = tl.load(chunks + 2 * tl.program_id(0)), tl.load(chunks + 2 * tl.program_id(0) + 1)
    token = (tl.load(starts + seq) + first + i).to(tl.int64)
    live = token < tl.load(starts + seq + 1)
    k_live, v_live = live[:, None] & (n < KEY_DIM)[None, :], live[:, None] & (dim < DIM)[None, :]
    k_at = qkv + token[:, None] * stride + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM + n[None, :]
    k = tl.load(k_at, mask=k_live, other=0.0)
    length = inverse_length(k, EPS)
    beta = tl.sigmoid(tl.load(b + token * ab_stride + head, mask=live, other=0.0).to(tl.float32)) * beta_scale
    since = tl.cumsum(log_decays(a, token, ab_stride, head, live, rate, bias), 0)
    similarity = tl.dot(k, tl.trans(k), input_precision=PRECISION) * length[None, :]
    system = similarity * (length * beta)[:, None] * decays(since, i)
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    solved = inverse(system, i, LEVELS, PRECISION) * beta[None, :]
    kind = qkv.dtype.element_ty
    keys = tl.dot((solved * (length * tl.exp(since))[None, :]).to(kind), k, input_precision=PRECISION)
    into = by_key + (token * HEADS + head)[:, None] * KEY_DIM + n[None, :]
    tl.store(into, keys.to(kind), mask=k_live)
    v_at = qkv + token[:, None] * stride + 2 * KEY_HEADS * KEY_DIM + head * DIM + dim[None, :]
    values = tl.dot(solved.to(kind), tl.load(v_at, mask=v_live, other=0.0), input_precision=PRECISION)
    into = by_value + (token * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(into, values.to(kind), mask=v_live)


@triton.jit
def delta_chunks(
    out: tl.tensor, by_key: tl.tensor, by_value: tl.tensor, qkv: tl.tensor, a: tl.tensor, rate: tl.tensor,
    bias: tl.tensor, state: tl.tensor, numbers: tl.tensor, starts: tl.tensor, rows: tl.tensor,
    positions: tl.tensor, stride: tl.tensor, ab_stride: tl.tensor, scale: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    STATES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the outputs of a longer sequence for one head, chunk by chunk with the state in registers, from
    `by_key` and `by_value` of `delta_solve`. Grid: (longer sequences, heads, value_dim / BLOCK_DIM)."""
    head = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    n, i = tl.arange(0, BLOCK_KEY), tl.arange(0, CHUNK)
    exists = (n < KEY_DIM)[:, None] & (dim < DIM)[None, :]
    start, end, row, position = place_of(numbers, starts, rows, positions, False)
    states = state + head * (KEY_DIM * DIM) + n[:, None] * DIM + dim[None, :]
    before_at = states + state_after(row, position, STATES) * (HEADS * KEY_DIM * DIM)
    h = tl.load(before_at, mask=exists & (position + 0 * n > 0)[:, None], other=0.0)
    kind = qkv.dtype.element_ty
    for first in range(start, end, CHUNK):
        token, live = (first + i).to(tl.int64), first + i < end
        k_live, v_live = live[:, None] & (n < KEY_DIM)[None, :], live[:, None] & (dim < DIM)[None, :]
        q_at = qkv + token[:, None] * stride + head // (HEADS // KEY_HEADS) * KEY_DIM + n[None, :]
        q = tl.load(q_at, mask=k_live, other=0.0)
        k = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=k_live, other=0.0)
        q_length, k_length = inverse_length(q, EPS) * scale, inverse_length(k, EPS)
        log_decay = log_decays(a, token, ab_stride, head, live, rate, bias)
        since, total = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        before, place = h.to(kind), (token * HEADS + head)[:, None]
        keys = tl.load(by_key + place * KEY_DIM + n[None, :], mask=k_live, other=0.0)
        values = tl.load(by_value + place * DIM + dim[None, :], mask=v_live, other=0.0).to(tl.float32)
        written = values - tl.dot(keys, before, input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decays(since, i) * k_length[None, :]
        y = tl.dot(q, before, input_precision=PRECISION) * tl.exp(since)[:, None]
        y += tl.dot(scores.to(kind), written.to(kind), input_precision=PRECISION)
        at = out + place * DIM + dim[None, :]
        tl.store(at, (y * q_length[:, None]).to(kind), mask=v_live)
        written *= (k_length * tl.exp(total - since))[:, None]
        h = h * tl.exp(total) + tl.dot(tl.trans(k), written.to(kind), input_precision=PRECISION)
    into = states + state_after(row, position + end - start, STATES) * (HEADS * KEY_DIM * DIM)
    tl.store(into, h, mask=exists)
