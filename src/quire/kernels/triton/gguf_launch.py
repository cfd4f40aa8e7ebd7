"""Launches of GEMMs with packed GGUF weights (`gguf.py`): linear layers, experts, embedding rows."""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels import batch_invariant
from quire.kernels.triton import gguf, gguf_rows, gguf_tiles
from quire.kernels.triton.activations import gated as gated_of
from quire.kernels.triton.gguf_decode import Bits, DecodeForm
from quire.kernels.triton.gguf_layout import KINDS, TILE, Planes
from quire.kernels.triton.gguf_plans import choose as choose_spread
from quire.kernels.triton.gguf_rows import WholeRows
from quire.kernels.triton.launch import launch, overlap
from quire.kernels.triton.matmul import TilesPlan, aligned, has_room, tiled
from quire.kernels.triton.moe_align import Sorted, add, most_tiles, sorted_mix
from quire.kernels.triton.tile_dots import arrivals_of

_SCRATCH_WEIGHTS = 1 << 26
"""Maximum elements of a weight that are unpacked at a time for the library's GEMM."""
_UNPACKED_ROWS, _UNPACKED_COLUMNS = 16, 256
"""Rows and columns of the weight that a program unpacks."""
_MOST_ROWS = 128
"""Maximum rows of x for GEMMs with packed weights; with more, weights are unpacked first."""
_PROGRAMS = 396
"""Number of programs that keep a large GPU busy: three per multiprocessor."""
_REACH = {2: 4, 4: 3, 8: 2}
"""`DecodeForm.reach` by the number of low bits of a code."""


class GGUFRowsPlan(NamedTuple):
    """Plan for `gguf.rows` with one or two tiles of weight rows per program."""

    two: bool
    warps: int


Plan = GGUFRowsPlan | WholeRows | TilesPlan | None
"""Plan of a GEMM. None: the weight is unpacked, and multiplied by the library."""


def linear(x: Tensor, planes: Planes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x W^T + b [M, N] for x [M, K]. It is written to `out` if this is not None, which may be some
    columns of a wider tensor."""
    if out is None:
        out = torch.empty(len(x), planes.rows, dtype=x.dtype, device=x.device)
    plan = _plan(x, planes, 1)
    if plan is None:
        return _unpack_and_multiply(out, x, planes, bias)
    return multiply(x, planes, bias, plan, out=out)


def gated(x: Tensor, planes: Planes, activation: str = "silu") -> Tensor:
    """Return act(x G^T) * (x U^T) for x [M, K]; the weight has the rows of G, then of U, in whole tiles."""
    plan = _plan(x, planes, 2)
    if plan is None:
        return gated_of(linear(x, planes), activation)
    return multiply(x, planes, None, plan, activation)


def multiply(
    x: Tensor,
    planes: Planes,
    bias: Tensor | None,
    plan: GGUFRowsPlan | WholeRows | TilesPlan,
    activation: str = "",
    out: Tensor | None = None,
) -> Tensor:
    """Compute `linear` with the kernel of `plan`, or with an `activation` compute `gated`."""
    num, size_out, size_in = len(x), planes.rows // (2 if activation else 1), planes.columns
    if out is None:
        out = torch.empty(num, size_out, dtype=x.dtype, device=x.device)
    ahead = overlap(num, min(size_in, size_out))
    if not isinstance(plan, TilesPlan):
        _launch_rows(out, x, planes, bias, plan, activation, ahead=ahead)
    else:
        num_tiles = triton.cdiv(num, plan.num) * triton.cdiv(size_out, plan.rows)
        _launch_tiles(out, x, planes, bias, plan, activation, num_tiles=num_tiles, ahead=ahead)
    return out


def mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Planes,
    down: Planes,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs, [T, hidden] for x [T, hidden]; the
    reference is `mix` of kernels/reference/moe.py. The weights have the rows of all experts, concatenated."""
    num, top, inner = len(x), ids.shape[1], down.columns
    if not num:
        return torch.empty_like(x)
    num_experts = gate_up.rows // (2 * inner)
    hidden = down.rows // num_experts
    plan = choose_experts(num * top, num_experts, fixed=batch_invariant.is_on())
    if plan is None:
        ahead = overlap(num, hidden)
        activated = torch.empty(num * top, inner, dtype=x.dtype, device=x.device)
        per_pair = torch.empty(num * top, hidden, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        first, last = _one_row(gate_up), _one_row(down)
        _launch_rows(activated, x, gate_up, gate_up_bias, first, activation, ids=ids, top=top, ahead=ahead)
        _launch_rows(per_pair, activated, down, down_bias, last, ids=ids, top=1, ahead=ahead)
        add(out, per_pair, ids, weights, ahead=ahead)
        return out
    most = most_tiles(num * top, num_experts, plan.num)

    def up(out: Tensor, x: Tensor, pairs: Sorted, *, ahead: bool) -> None:
        tiles = most * triton.cdiv(inner, plan.rows)
        operands = gate_up, gate_up_bias, plan, activation
        _launch_tiles(out, x, *operands, num_tiles=tiles, top=top, pairs=pairs, ahead=ahead)

    def down_of(out: Tensor, x: Tensor, pairs: Sorted, *, ahead: bool) -> None:
        tiles = most * triton.cdiv(hidden, plan.rows)
        _launch_tiles(out, x, down, down_bias, plan, num_tiles=tiles, top=1, pairs=pairs, ahead=ahead)

    return sorted_mix(x, ids, weights, up, down_of, sizes=(num_experts, inner), height=plan.num)


def _launch_rows(
    out: Tensor,
    x: Tensor,
    planes: Planes,
    bias: Tensor | None,
    plan: GGUFRowsPlan | WholeRows,
    activation: str = "",
    *,
    ids: Tensor | None = None,
    top: int = 0,
    ahead: bool,
) -> None:
    form, extras = form_of(planes), (out if bias is None else bias, out if ids is None else ids)
    if isinstance(plan, WholeRows):
        units = max(triton.next_power_of_2(planes.columns // form.unit), 32 * plan.warps)
        launch(gguf_rows.rows, gguf_rows.programs(out.shape[1], plan, gated=bool(activation)), len(out))(
            out, x, whole_bits_of(planes), *extras, planes.columns, out.shape[1], x.stride(0), out.stride(0),
            FORM=form, ACTIVATION=activation, BIASED=bias is not None, TOP=top,
            TWO=plan.two or activation != "", UNITS=units, OVERLAP=ahead, launch_pdl=ahead,
            num_warps=plan.warps,
        )  # fmt: skip
        return
    per_program = TILE * (2 if plan.two and not activation else 1)
    launch(gguf.rows, triton.cdiv(out.shape[1], per_program), len(out))(
        out, x, bits_of(planes), *extras, planes.columns, out.shape[1], x.stride(0), out.stride(0), FORM=form,
        ACTIVATION=activation,
        BIASED=bias is not None, TOP=top, TWO=plan.two or activation != "", UNITS=32 * plan.warps,
        OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps,
    )  # fmt: skip


def _launch_tiles(
    out: Tensor,
    x: Tensor,
    planes: Planes,
    bias: Tensor | None,
    plan: TilesPlan,
    activation: str = "",
    *,
    num_tiles: int,
    pairs: tuple[Tensor, Tensor] | None = None,
    top: int = 0,
    ahead: bool,
) -> None:
    form, (num, size_out), parts = form_of(planes), out.shape, out
    spread = _uses_gguf_tiles(form, x)
    splits = 1 if pairs is not None or activation and not spread else plan.splits
    if splits > 1:
        size = (2 if activation else 1) * splits * num * size_out
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    kernel = gguf_tiles.tiles if spread else gguf.tiles
    operands: tuple[Any, ...] = x, bits_of(planes)
    if spread:
        units = plan.length // form.unit
        beside = halves = gguf_tiles.halves(planes.low, plan.rows, units)
        if form.high:
            beside = gguf_tiles.beside(planes.high, plan.rows, units, form.high)
        operands = x if pairs is not None else _descriptor(x, plan), halves, beside, whole_bits_of(planes)
    launch(kernel, num_tiles, splits)(
        out, *operands, out if bias is None else bias, (parts, arrivals_of(x.device)),
        (out, out) if pairs is None else pairs, num, planes.columns, size_out, x.stride(0), out.stride(0),
        FORM=form, ACTIVATION=activation, BIASED=bias is not None, TOP=top, NUM=plan.num, ROWS=plan.rows,
        UNITS=plan.length // form.unit, SPLITS=splits, OVERLAP=ahead, launch_pdl=ahead, num_warps=plan.warps,
        num_stages=plan.stages,
    )  # fmt: skip


def _descriptor(x: Tensor, plan: TilesPlan) -> TensorDescriptor:
    return tiled(x if aligned(x) else x.contiguous(), plan.num, plan.length)


def rows(ids: Tensor, planes: Planes, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight rows `ids` [T]: [T, columns]."""
    out = torch.empty(len(ids), planes.columns, dtype=dtype, device=ids.device)
    if len(ids):
        _launch_unpack(out, planes, ids, 0, height=1)
    return out


def unpack(planes: Planes, dtype: torch.dtype, first: int = 0, num: int | None = None) -> Tensor:
    """Return `num` dequantized weight rows from `first` on, [num, columns]; None: all of them."""
    num = planes.rows - first if num is None else num
    out = torch.empty(num, planes.columns, dtype=dtype, device=planes.data.device)
    _launch_unpack(out, planes, None, first, height=_UNPACKED_ROWS)
    return out


def _launch_unpack(out: Tensor, planes: Planes, ids: Tensor | None, first: int, *, height: int) -> None:
    form, num = form_of(planes), len(out)
    units = planes.columns // form.unit
    most = _UNPACKED_COLUMNS // form.unit
    ahead = ids is not None and overlap(num)
    launch(gguf.unpack, triton.cdiv(num, height), triton.cdiv(units, most))(
        out, bits_of(planes), out if ids is None else ids, first, num, planes.columns, FORM=form,
        CHOSEN=ids is not None, ROWS=height, UNITS=most, OVERLAP=ahead, launch_pdl=ahead, num_warps=4,
    )  # fmt: skip


def _unpack_and_multiply(out: Tensor, x: Tensor, planes: Planes, bias: Tensor | None) -> Tensor:
    step = max(_SCRATCH_WEIGHTS // planes.columns // TILE, 1) * TILE
    for first in range(0, planes.rows, step):
        num = min(step, planes.rows - first)
        weight, columns = unpack(planes, x.dtype, first, num), out[:, first : first + num]
        if bias is None:
            torch.mm(x, weight.t(), out=columns)
        else:
            torch.addmm(bias[first : first + num].to(x.dtype), x, weight.t(), out=columns)
    return out


def form_of(planes: Planes) -> DecodeForm:
    return _form_of(planes.kind)


@functools.cache
def _form_of(name: str) -> DecodeForm:
    kind = KINDS[name]
    sizes = kind.low, kind.high, kind.unit, kind.words, kind.zero
    return DecodeForm(*sizes, kind.lows, kind.subs, kind.book, _REACH[kind.low], kind.halved)


def whole_bits_of(planes: Planes) -> Bits:
    """Return the tensors of a weight, with scales and sub-scales viewed as integers. The two scales (or
    sub-scales) of a unit are one integer, so that a kernel reads both at once."""
    form, bits = KINDS[planes.kind], bits_of(planes)
    scales = planes.scales.view(torch.int32 if form.lows or form.halved else torch.int16)
    return bits._replace(scales=scales, subs=planes.subs.view(torch.int16) if form.subs else planes.subs)


def bits_of(planes: Planes) -> Bits:
    return Bits(planes.low, planes.high, planes.subs, planes.scales, planes.powers)


def _uses_gguf_tiles(form: DecodeForm, x: Tensor) -> bool:
    """Whether this GPU can use the kernel of gguf_tiles.py, which dequantizes codes in pairs and loads tiles
    by TMA, for the format and the dtype of x."""
    return gguf_tiles.takes(form) and x.dtype.itemsize == 2 and has_room()


def _plan(x: Tensor, planes: Planes, parts: int) -> Plan:
    form, num, fixed = form_of(planes), len(x), batch_invariant.is_on()
    if _uses_gguf_tiles(form, x) or num == 1 and gguf_tiles.takes(form) and not fixed:
        high = form.high > 0
        return choose_spread(num, planes.rows, planes.columns, parts, form.unit, high=high, fixed=fixed)
    return choose(num, planes.rows, planes.columns, parts, fixed=fixed)


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int, *, fixed: bool = False) -> Plan:
    """Return the plan for `num` rows of x and a weight [size_out, size_in]; `parts` is 2 for gate and up. A
    `fixed` plan, for the batch-invariant mode, does not depend on the number of rows."""
    if fixed and num:
        return TilesPlan(64, 128, 128, 1, 8, 2)
    if not 0 < num <= _MOST_ROWS:
        return None
    if num == 1:
        return GGUFRowsPlan(True, 4)
    height = max(triton.next_power_of_2(num), 16)
    rows, length, warps, stages = (64, 256, 4, 3) if height <= 16 else (128, 128, 8, 3 if height <= 64 else 2)
    splits = min(_PROGRAMS // triton.cdiv(size_out // parts, rows), size_in // (4 * length), 8)
    return TilesPlan(height, rows, length, 1 << max(splits, 1).bit_length() - 1, warps, stages)


def _one_row(planes: Planes) -> GGUFRowsPlan | WholeRows:
    return WholeRows(132, 2) if gguf_tiles.takes(form_of(planes)) else GGUFRowsPlan(True, 4)


@functools.cache
def choose_experts(num_pairs: int, num_experts: int, *, fixed: bool = False) -> TilesPlan | None:
    """Return the plan for `num_pairs` (token, expert) pairs; None: multiply each pair on its own. A `fixed`
    plan, for the batch-invariant mode, does not depend on the number of pairs."""
    mean = num_pairs / num_experts
    if fixed:
        return TilesPlan(64, 128, 128, 1, 8, 3)
    if mean <= 0.5:  # hardly any two pairs share an expert
        return None
    return TilesPlan(16, 64, 256, 1, 4, 3) if mean <= 16 else TilesPlan(64, 128, 128, 1, 8, 3)
