"""GEMM of tiles of (token, expert) pairs with the weights of their expert on the tensor cores."""

import triton
import triton.language as tl

from quire.kernels.triton.activations import times as gate_times
from quire.kernels.triton.launch import follow
from quire.kernels.triton.lora_few import plus_added
from quire.kernels.triton.moe_align import tile_at
from quire.kernels.triton.tile_dots import along_x, empty, plus, times, upright


@triton.jit(do_not_specialize=["num"])
def tiles(
    out: tl.tensor, x: tl.tensor, x_scale: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor,
    order: tl.tensor, work: tl.tensor, num: tl.tensor, size_in: tl.tensor, size_out: tl.tensor,
    x_stride: tl.tensor, added: tl.tensor, slots: tl.tensor,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, LENGTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of sorted (token, expert) pairs. `weight` is a descriptor of tiles; x has `num` rows.
    With an activation, compute gate and up from tokens `x`. Without one, compute down from tiles `x` of
    sorted pairs, and store rows in their order before the sort. Grid: (tiles * size_out / ROWS,)."""
    stripes = tl.cdiv(size_out, ROWS)
    tile, first_n = tl.program_id(0) // stripes, tl.program_id(0) % stripes * ROWS
    follow(OVERLAP)
    if tile >= tl.load(work):
        return
    expert, start, end, pair, m = tile_at(order, work, tile, NUM)
    n = first_n + tl.arange(0, ROWS)
    acc, up = empty(NUM, ROWS), empty(NUM, ROWS)
    if ACTIVATION != "":
        row, x_row, k = expert * 2 * size_out + first_n, pair // TOP, tl.arange(0, LENGTH)
        block, other = _scale_rows(expert, first_n, size_out)
        at_x = x + (x_row * x_stride)[:, None] + k[None, :]
        for at in range(0, size_in, LENGTH):
            a = _load_x(at_x + at, k < size_in - at, EVEN)
            acc = _dot(acc, a, weight, row, at, block, scale, x_scale, x_row, num, size_in, BLOCKED)
            up = _dot(up, a, weight, row + size_out, at, other, scale, x_scale, x_row, num, size_in, BLOCKED)
    else:
        row, x_row = expert * size_out + first_n, tl.minimum(m, end - 1)
        block = expert * tl.cdiv(size_out, 128) + first_n // 128
        for at in range(0, size_in, LENGTH):
            a = x.load([start, at])
            acc = _dot(acc, a, weight, row, at, block, scale, x_scale, x_row, num, size_in, BLOCKED)
    row += tl.arange(0, ROWS)
    acc = _rescale(acc, scale, x_scale, row, n < size_out, x_row, NUM, BLOCKED)
    if ACTIVATION != "":
        up = _rescale(up, scale, x_scale, row + size_out, n < size_out, x_row, NUM, BLOCKED)
    inside = (m < end)[:, None] & (n < size_out)[None, :]
    y = _finish(acc, up, bias, row, m, n, pair, inside, size_out, out, added, slots, NUM, ACTIVATION)
    to = m.to(tl.int64) if ACTIVATION != "" else pair
    tl.store(out + to[:, None] * size_out + n[None, :], y, mask=inside)


@triton.jit
def _finish(
    acc: tl.tensor, up: tl.tensor, bias: tl.tensor, row: tl.tensor, m: tl.tensor, n: tl.tensor,
    pair: tl.tensor, inside: tl.tensor, size_out: tl.tensor, out: tl.tensor, added: tl.tensor,
    slots: tl.tensor,
    NUM: tl.constexpr, ACTIVATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the output of `tiles` from its sums: add bias and LoRA outputs, and apply the activation. LoRA
    outputs of gate and up are indexed by pair, those of down by sorted pair."""
    src = pair if ACTIVATION != "" else m.to(tl.int64)
    place = src[:, None] * (2 * size_out if ACTIVATION != "" else size_out) + n[None, :]
    y = _add_bias(acc, bias, row, n < size_out, out, added, slots, src, place, inside, NUM)
    if ACTIVATION != "":
        place, row = place + size_out, row + size_out
        up = _add_bias(up, bias, row, n < size_out, out, added, slots, src, place, inside, NUM)
        y = gate_times(y, up, ACTIVATION)
    return y


@triton.jit
def _dot(
    acc: tl.tensor, a: tl.tensor, weight: tl.tensor, row: tl.tensor, at: tl.tensor, block: tl.tensor,
    scale: tl.tensor, x_scale: tl.tensor, x_row: tl.tensor, num: tl.tensor, size_in: tl.tensor,
    BLOCKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return `acc` plus the product of one step of inputs from `at` on; `block` is the row of the weight's
    scales, `x_row` are the rows of `x_scale`."""
    w = weight.load([row, at])
    if BLOCKED:
        of_x = along_x(tl.load(x_scale + at // 128 * num + x_row), a.shape[0])
        return plus(acc, a, w, of_x, scale + block * tl.cdiv(size_in, 128) + at // 128, BLOCKED)
    else:
        return times(a, w, acc)


@triton.jit
def _rescale(
    acc: tl.tensor, scale: tl.tensor, x_scale: tl.tensor, row: tl.tensor, exists: tl.tensor, x_row: tl.tensor,
    NUM: tl.constexpr, BLOCKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    if scale is not None and not BLOCKED:
        factor = tl.load(scale + row, mask=exists, other=0.0)
        acc *= factor[:, None] if NUM < 64 else factor[None, :]
        acc *= along_x(tl.load(x_scale + x_row), NUM)
    return acc


@triton.jit
def _add_bias(
    acc: tl.tensor, bias: tl.tensor, row: tl.tensor, exists: tl.tensor, like: tl.tensor, added: tl.tensor,
    slots: tl.tensor, src: tl.tensor, place: tl.tensor, inside: tl.tensor,
    NUM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the sums (transposed if needed) plus bias and LoRA outputs, rounded. `src` are the rows' indices
    in `slots`, `place` the offsets of the LoRA outputs in `added`."""
    if bias is not None:
        offset = tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
        acc += offset[:, None] if NUM < 64 else offset[None, :]
    if added is None:
        return upright(acc.to(like.dtype.element_ty), NUM)
    else:
        return plus_added(upright(acc, NUM), added, slots, src, place, inside).to(like.dtype.element_ty)


@triton.jit
def _scale_rows(expert: tl.tensor, first_n: tl.tensor, size_out: tl.tensor) -> tl.tensor:
    """Return the row of block scales at which the outputs from `first_n` on begin, for an expert's gate
    projection and for its up projection."""
    block = expert * tl.cdiv(2 * size_out, 128) + first_n // 128
    return block, block + size_out // 128


@triton.jit
def _load_x(at: tl.tensor, exists: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Load a step of rows of x; with `EVEN`, no mask is needed."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=exists[None, :], other=0.0)
