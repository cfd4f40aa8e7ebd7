"""GEMM of few rows with a large weight, x W^T, which is bound by weight reads.

`_rows` holds whole rows of the weight in registers, loaded before the previous kernel has ended. `_tiles`
multiplies tiles on the tensor cores. Both kernels also take weights with scales (`fp8.py`, `int8.py`). The
cases in which they are faster than the library's GEMM were measured.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels import batch_invariant, library_matmul
from quire.kernels.ops import LoRAHeads
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.activations import silu_times
from quire.kernels.triton.launch import MOST_ROWS, cdiv, follow, launch, next_power_of_2, overlap
from quire.kernels.triton.lora import (
    Expansion,
    add,
    added_to_one,
    begin,
    expanded,
    is_short,
    reached,
    shrink,
    wait,
)
from quire.kernels.triton.lora_few import lora_outputs, plus_added
from quire.kernels.triton.tile_dots import (
    LONGEST,
    all_of,
    along_x,
    arrivals_of,
    empty,
    plus,
    scales_of,
    upright,
)

_FEWEST = 5
"""Minimum number of rows of x for which tiles are used for any weight."""
_SMALL = 2**23
"""Maximum elements of a weight that counts as small: it can be read again from the L2 cache."""
_GROUP = 8
"""Number of stripes of rows of x whose tiles run at the same time, so that they share the L2 cache."""


class RowsPlan(NamedTuple):
    """Plan for `_rows`: weight rows per program, and warps."""

    rows: int
    warps: int


class TilesPlan(NamedTuple):
    """Plan for `_tiles`: rows of x, weight rows and inputs per tile, split-K splits, compile options."""

    num: int
    rows: int
    length: int
    splits: int
    warps: int
    stages: int


Plan = RowsPlan | TilesPlan | None
"""GEMM plan; None is the library's GEMM."""


@triton.jit
def _rows(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, size_in: tl.tensor,
    size_out: tl.tensor, x_stride: tl.tensor, added: tl.tensor,
    NUM: tl.constexpr, GATED: tl.constexpr, BLOCKED: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply NUM rows of x [NUM, size_in] by ROWS weight rows, to `out` [NUM, size_out]. If the weight's
    scales are `BLOCKED`, the rows lie in one block. If `GATED`, the rows of the up projection follow those of
    the gate. `added` are the LoRA outputs of a single row. Grid: (size_out / ROWS,)."""
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exists = (n < size_out)[:, None] & (k < size_in)[None, :]
    at = weight + n.to(tl.int64)[:, None] * size_in + k[None, :]
    w = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
    first, outputs = tl.program_id(0) * ROWS, size_out * 2 if GATED else size_out
    by_k, by_n = scales_of(scale, 0, first, n, k, size_in, outputs, BLOCKED)
    if GATED:
        at += size_out.to(tl.int64) * size_in
        up = tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
        up_by_k, up_by_n = scales_of(scale, 0, size_out + first, size_out + n, k, size_in, outputs, BLOCKED)
    if bias is not None:
        offset = tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)
    follow(OVERLAP)
    for m in tl.static_range(NUM):
        row = tl.load(x + m * x_stride + k, mask=k < size_in, other=0.0).to(tl.float32)
        y = tl.sum(w.to(tl.float32) * (row * by_k)[None, :], 1) * by_n
        if bias is not None:
            y += offset
        if added is not None:
            y += tl.load(added + n, mask=n < size_out, other=0.0)
        y = y.to(out.dtype.element_ty)
        if GATED:
            other = tl.sum(up.to(tl.float32) * (row * up_by_k)[None, :], 1) * up_by_n
            if added is not None:
                other += tl.load(added + size_out + n, mask=n < size_out, other=0.0)
            y = silu_times(y, other.to(out.dtype.element_ty))
        tl.store(out + m * size_out + n, y, mask=n < size_out)


@triton.jit(do_not_specialize=["num"])
def _tiles(
    out: tl.tensor, x: tl.tensor, x_scale: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor,
    parts: tl.tensor, arrivals: tl.tensor, num: tl.tensor, size_in: tl.tensor, size_out: tl.tensor,
    lora: tl.tuple,
    GATED: tl.constexpr, BLOCKED: tl.constexpr, RANK: tl.constexpr, ENDS: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, LENGTH: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of x W^T + b from descriptors `x` and `weight`. The last split to finish sums the
    results of all (`parts`); `arrivals` is zero before and after. If `BLOCKED`, a tile of the weight has one
    scale. `lora` is None, the `reads` of an `Expansion` (with a `RANK`), or `AddedRows`; the previous kernels
    then are those of LoRA. Tiles are ordered by outputs, or by outputs within `GROUP` stripes of rows. Grid:
    (tiles, SPLITS)."""
    LATE: tl.constexpr = lora is not None
    tile, stripes = tl.program_id(0), tl.cdiv(num, NUM)
    first_m, first_n = tile % stripes * NUM, tile // stripes * ROWS
    if GROUP:
        width = GROUP * tl.cdiv(size_out, ROWS)
        first_stripe, rest = tile // width * GROUP, tile % width
        height = tl.minimum(stripes - first_stripe, GROUP)
        first_m, first_n = (first_stripe + rest % height) * NUM, rest // height * ROWS
    share = tl.cdiv(tl.cdiv(size_in, LENGTH), SPLITS) * LENGTH
    first = tl.program_id(1) * share
    begin(OVERLAP, LATE)
    reach, reach_up = 0, 0
    if RANK:
        reach = reached(lora, first_n, 0, RANK, ROWS)
        reach_up = reached(lora, first_n + size_out, 0, RANK, ROWS) if GATED else reach
    acc, up = empty(NUM, ROWS), empty(NUM, ROWS)
    for at in range(first, tl.minimum(first + share, size_in), LENGTH):
        a = x.load([first_m, at])
        factor, block = _block_scales(x_scale, scale, first_m, first_n, at, num, size_in, NUM, BLOCKED)
        acc = plus(acc, a, weight.load([first_n, at]), factor, block, BLOCKED)
        if GATED:
            if BLOCKED:
                block += size_out // 128 * tl.cdiv(size_in, 128)
            up = plus(up, a, weight.load([first_n + size_out, at]), factor, block, BLOCKED)
    acc, up = upright(acc, NUM), upright(up, NUM)
    wait(OVERLAP, LATE)
    m, n = first_m + tl.arange(0, NUM), first_n + tl.arange(0, ROWS)
    inside, place = (m < num)[:, None] & (n < size_out)[None, :], m[:, None] * size_out + n[None, :]
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1) * num * size_out + place, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1) < SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = all_of(parts + place, inside, num * size_out, SPLITS)
    acc = _apply_scales(acc, x_scale, scale, 0, m, n, num, size_out, BLOCKED)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)[None, :]
    outputs, rows = size_out * (1 + GATED), (out, m, num, inside)
    y = _add_lora(acc, lora, rows, first_n, outputs, reach, RANK, ENDS)
    if GATED:
        up = _apply_scales(up, x_scale, scale, size_out, m, n, num, size_out, BLOCKED)
        up = _add_lora(up, lora, rows, first_n + size_out, outputs, reach_up, RANK, ENDS)
        y = silu_times(y, up)
    tl.store(out + place, y, mask=inside)


@triton.jit
def _block_scales(
    x_scale: tl.tensor, scale: tl.tensor, first_m: tl.tensor, first_n: tl.tensor, at: tl.tensor,
    num: tl.tensor, size_in: tl.tensor,
    NUM: tl.constexpr, BLOCKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the scales of rows of x at input `at`, and the address of the weight's scale there."""
    if BLOCKED:
        m = first_m + tl.arange(0, NUM)
        factor = along_x(tl.load(x_scale + at // 128 * num + m, mask=m < num, other=0.0), NUM)
        return factor, scale + first_n // 128 * tl.cdiv(size_in, 128) + at // 128
    else:
        return 1.0, 0


@triton.jit
def _apply_scales(
    acc: tl.tensor, x_scale: tl.tensor, scale: tl.tensor, first: tl.tensor, m: tl.tensor, n: tl.tensor,
    num: tl.tensor, size_out: tl.tensor,
    BLOCKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the sums `acc` times the scales of rows `m` of x and of outputs `n`. The scales of these outputs
    begin at index `first` of `scale`. If `BLOCKED`, return `acc`, which has the scales already."""
    if scale is not None and not BLOCKED:
        acc *= tl.load(x_scale + m, mask=m < num, other=0.0)[:, None]
        acc *= tl.load(scale + first + n, mask=n < size_out, other=0.0)[None, :]
    return acc


@triton.jit
def _add_lora(
    acc: tl.tensor, lora: tl.tuple, rows: tl.tuple, first: tl.tensor, outputs: tl.tensor, reach: tl.tensor,
    RANK: tl.constexpr, ENDS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the LoRA outputs to the sums `acc` of the outputs from `first` on, and round. With a RANK they are
    computed here, otherwise loaded."""
    out, m, num, inside = rows
    NUM: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    if RANK:
        acc += expanded(lora, m, num, first, reach, RANK, ENDS, NUM, ROWS)
    elif lora is not None:
        added, slots = lora
        place = m[:, None] * outputs + first + tl.arange(0, ROWS)[None, :]
        acc = plus_added(acc, added, slots, tl.where(m < num, m, -1), place, inside)
    return acc.to(out.dtype.element_ty)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, adapted: LoRAHeads | None = None) -> Tensor:
    """Return x W^T + b [M, N] for x [M, K] and W [N, K], plus the LoRA outputs of `adapted`."""
    x, plan = _plan(x, weight, 1, adapted)
    if adapted is None or takes_along(plan, adapted):
        if plan is None:
            return library_matmul.linear(x, weight, bias)
        return multiply(x, weight, bias, plan, adapted=adapted)
    return add(linear(x, weight, bias), x, adapted)


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b by the library's GEMM, or in the batch-invariant mode by `linear`."""
    return (linear if batch_invariant.is_on() else library_matmul.linear)(x, weight, bias)


def gated(x: Tensor, weight: Tensor, adapted: LoRAHeads | None = None) -> Tensor:
    """Return silu(x G^T) * (x U^T) for x [M, K]; the weight [2N, K] has the rows of G, then those of U. The
    LoRA outputs of `adapted` are added to both products."""
    x, plan = _plan(x, weight, 2, adapted)
    if plan is not None and (adapted is None or takes_along(plan, adapted)):
        return multiply(x, weight, None, plan, gated=True, adapted=adapted)
    return gated_of(linear(x, weight, None, adapted), "silu")


def takes_along(plan: Plan, adapted: LoRAHeads) -> bool:
    """Whether the GEMM kernel of `plan` itself adds the LoRA outputs of `adapted`. If it also has to multiply
    by the LoRA matrix B, the outputs of a program must belong to one part of the layer (such as queries), and
    registers must suffice for their sums. In the batch-invariant mode, a separate kernel adds the outputs."""
    if batch_invariant.is_on():
        return False
    if isinstance(plan, TilesPlan) and adapted.tokens.few is None:
        return plan.rows <= 64 and is_short(adapted) and not any(size % plan.rows for size in adapted.sizes)
    return plan is not None


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: RowsPlan | TilesPlan,
    *,
    gated: bool = False,
    adapted: LoRAHeads | None = None,
    x_scale: Tensor | None = None,
    scale: Tensor | None = None,
    blocked: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `linear`, or `gated` if `gated`, with the kernel of `plan`. A weight in e4m3 (or in int8, for a
    `RowsPlan`) has a `scale` per output, or per block of 128 x 128 if `blocked`; for a `TilesPlan`, x is then
    in e4m3 with its `x_scale`. `dtype` is the dtype of the output."""
    num, size_out, size_in = len(x), len(weight) // (1 + gated), weight.shape[1]
    out = torch.empty(num, size_out, dtype=dtype or x.dtype, device=x.device)
    ahead, grid = overlap(num, min(size_in, size_out)), cdiv(size_out, plan.rows)
    if isinstance(plan, RowsPlan):
        launch(_rows, grid)(
            out, x, weight, scale, bias, size_in, size_out, x.stride(0),
            None if adapted is None else added_to_one(x, adapted), NUM=num, GATED=gated, BLOCKED=blocked,
            ROWS=plan.rows, LENGTH=next_power_of_2(size_in), OVERLAP=ahead, launch_pdl=ahead,
            num_warps=plan.warps,
        )  # fmt: skip
        return out
    lora, rank, ends = (None, 0, ()) if adapted is None else _lora_arguments(x, adapted)
    parts = out
    if plan.splits > 1:
        parts = torch.empty(plan.splits * num * size_out, dtype=torch.float32, device=x.device)
    launch(_tiles, cdiv(num, plan.num) * grid, plan.splits)(
        out, tiled(x, plan.num, plan.length), x_scale, tiled(weight, plan.rows, plan.length), scale, bias,
        parts, arrivals_of(x.device), num, size_in, size_out, lora, GATED=gated, BLOCKED=blocked, RANK=rank,
        ENDS=ends, NUM=plan.num, ROWS=plan.rows, LENGTH=plan.length, SPLITS=plan.splits,
        GROUP=_group_of(num, plan), OVERLAP=ahead, launch_pdl=ahead,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def _lora_arguments(x: Tensor, adapted: LoRAHeads) -> Expansion:
    """Return the LoRA arguments of `_tiles`, after the launch of the kernels that compute them: LoRA outputs
    if there are few rows per adapter, otherwise shrunk rows."""
    if (few := adapted.tokens.few) is not None:
        return Expansion(lora_outputs(x, adapted._replace(tokens=few)), 0, ())
    return Expansion.of(adapted, shrink(x, adapted, late=True))


def _group_of(num: int, plan: TilesPlan) -> int:
    is_large = plan.num >= 128 and num > _GROUP * plan.num
    return _GROUP if is_large and batch_invariant.is_on() else 0


def tiled(matrix: Tensor, rows: int, length: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, length])


def _plan(x: Tensor, weight: Tensor, parts: int, adapted: LoRAHeads | None) -> tuple[Tensor, Plan]:
    """Return x [M, K] and the plan of its GEMM with `weight`; `parts` is 2 for gate and up. In the
    batch-invariant mode, x is copied if it is not aligned for TMA."""
    most = 2 * MOST_ROWS if adapted is None else MOST_ROWS
    if weight.dtype not in (torch.bfloat16, torch.float16) or not len(x):
        return x, None
    if batch_invariant.is_on():
        if not aligned(weight):
            return x, None
        x = x if aligned(x) else x.clone(memory_format=torch.contiguous_format)
        return x, choose_fixed(len(x), len(weight), weight.shape[1], parts)
    if len(x) > most:
        return x, None
    # `_rows` supports the adapter of a single row only.
    num = len(x) if adapted is None or len(x) == 1 else max(len(x), _FEWEST)
    plan = choose(num, len(weight), weight.shape[1], parts)
    fits = isinstance(plan, RowsPlan) or (aligned(x) and aligned(weight) and has_room())
    return x, plan if fits else None


@functools.cache
def has_room() -> bool:
    """Whether the tiles that are loaded at the same time, up to 197 KB, fit into the shared memory of a
    multiprocessor, as on Hopper and large Blackwell GPUs."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)


def aligned(matrix: Tensor) -> bool:
    """Whether the matrix is aligned for TMA: tiles begin at multiples of 16 bytes."""
    return matrix.stride(0) % 8 == 0 and matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int) -> Plan:
    """Return the plan for `num` rows and a weight of this shape; `parts` is 2 for gate and up.

    The plans were measured on an H200 in CUDA graphs of GEMMs with different weights; see
    docs/evidence/kernels.md.
    """
    length = next_power_of_2(size_in)
    if num == 1 and length <= LONGEST:
        return RowsPlan(max(4096 * parts // length, 1), 8)
    if num == 2 and length <= 4096 and size_out < 2**16:
        return RowsPlan(max(8192 // length, 1), 4)
    if num <= 4 and length <= 4096 and size_out <= 1024:
        return RowsPlan(max(8192 // length, 1), 4)
    large = size_out * size_in >= 3 * 2**23
    if num > 32 and size_out * size_in <= _SMALL:
        return _choose_small(num, size_out, size_in, parts)
    if parts == 2 and large and num > 64 and (num <= 128 or num == 256):
        return TilesPlan(128, 128, 64, 1, 8, 4)
    if num > 128 or num > 16 and size_out >= 2**16:
        return None
    if parts == 1 and num > 64 and (num % 64 or large and size_out > size_in):
        return None  # an incomplete tile of 64 rows is slow to load
    height = 16 if num <= 16 else 32 if num <= 32 else 64
    rows = 32 if 32 < num <= 64 and size_out <= 4096 else 64
    splits = 1
    if parts == 1 and num <= 32:
        splits = 8 if num <= 16 and size_out <= 1024 else 2 if size_in > 8192 else 1
    return TilesPlan(height, rows, 128, splits, 4, 4 if parts == 2 else 6)


def _choose_small(num: int, size_out: int, size_in: int, parts: int) -> Plan:
    """Return the plan for more than 32 rows and a weight small enough to be read again from the L2 cache. It
    should have enough programs for all multiprocessors."""
    if parts == 2:
        if num <= 128:
            return TilesPlan(64, 32 if num <= 64 else 64, 128, 1, 4, 4)
        return TilesPlan(32 if num % 64 else 64, 64, 64, 1, 4, 4)
    if size_out <= 2048:
        return TilesPlan(32, 64, 128, 2 if num <= 64 or num <= 128 and size_in > 2048 else 1, 4, 6)
    if num <= 128:
        return TilesPlan(64, 32 if num <= 64 else 64, 128, 1, 4, 6)
    return None if num % 64 else TilesPlan(64, 128, 128, 1, 4, 4)


@functools.cache
def choose_fixed(num: int, size_out: int, size_in: int, parts: int) -> TilesPlan:
    """Return the plan of the batch-invariant mode. Sums have one order for every plan: each is a chain of
    tensor core operations of equal length along K, without split-K. Tiles have 64 rows of x or of the weight
    at least, as smaller ones use another instruction."""
    if not has_room():
        return TilesPlan(64, 64, 64, 1, 4, 3 - (parts == 2))
    outputs, stages = size_out // parts, 4 if parts == 2 else 6
    if outputs >= 2**16:  # the output layer
        height = 16 if num <= 16 else 32 if num <= 32 else 64
        return TilesPlan(height, 128, 128, 1, 4, 4) if num <= 64 else TilesPlan(128, 256, 64, 1, 8, 4)
    if num <= 32:
        return TilesPlan(16 if num <= 16 else 32, 64, 128, 1, 4, stages)
    if num <= 64:
        return TilesPlan(64, 32 if outputs <= 4096 else 64, 128, 1, 4, stages)
    if num <= 256 and parts == 2:
        is_small = size_out * size_in <= _SMALL
        return TilesPlan(64, 64, 64, 1, 4, 4) if is_small else TilesPlan(128, 128, 64, 1, 8, 4)
    if num <= 256 and outputs <= 8192:
        return _choose_fixed_middle(num, outputs, size_in)
    return TilesPlan(128, 128, 64, 1, 8, 3 if parts == 2 or min(size_in, outputs) <= 2048 else 4)


def _choose_fixed_middle(num: int, outputs: int, size_in: int) -> TilesPlan:
    """Return the plan of the batch-invariant mode for 65 to 256 rows of x."""
    if outputs * size_in <= _SMALL:
        if num > 128 and outputs > 2048:
            return TilesPlan(64, 128, 128, 1, 4, 4)
        return TilesPlan(32 if outputs <= 2048 or num % 64 else 64, 64, 128, 1, 4, 6)
    if num <= 128 and outputs <= 4096:
        return TilesPlan(64, 64, 128, 1, 4, 6)
    return TilesPlan(64, 128, 128 if num <= 128 or outputs <= 4096 else 64, 1, 4, 4)
