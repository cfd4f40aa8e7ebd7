"""Plans of GEMMs with GGUF weights and with grouped int4 weights.

They were measured on an H200 in CUDA graphs of GEMMs with different weights."""

import functools
from typing import NamedTuple

import triton

from quire.kernels.triton.gguf_rows import WholeRows
from quire.kernels.triton.matmul import TilesPlan

MOST_ROWS = 512
"""Maximum rows of x for tiles; with more, the weight is unpacked first."""
_MOST_UNITS = 2048
"""Maximum units of a weight row that a program can load into registers."""
_WHOLE = {
    (32, False): {
        128: WholeRows(528, 4),
        512: WholeRows(264, 4, two=False),
        _MOST_UNITS: WholeRows(264, 8, two=False),
    },
    (16, False): {256: WholeRows(528, 8, two=False), _MOST_UNITS: WholeRows(132, 16, two=False)},
    (32, True): {128: WholeRows(264, 4), _MOST_UNITS: WholeRows(132, 16, two=False)},
}
"""Plans for one row of x, by (columns of a unit, whether codes have high bits), then by the maximum units of
a row."""
_WHOLE_GATED_BYTES = WholeRows(396, 8)
"""Plan for one row of x and 8-bit gate and up projections with up to 256 units per row."""


class _Shapes(NamedTuple):
    """Plans for some number of rows of x: tiles of a single weight, tiles of a gate and an up projection, and
    the maximum number of programs. The lengths of the tiles are for units of 32 columns."""

    one: TilesPlan
    gated: TilesPlan | None
    programs: int


_SHAPES = {
    16: _Shapes(TilesPlan(16, 64, 256, 8, 4, 3), TilesPlan(16, 128, 256, 2, 8, 3), 768),
    32: _Shapes(TilesPlan(32, 64, 256, 8, 4, 3), TilesPlan(32, 64, 256, 1, 4, 3), 400),
    64: _Shapes(TilesPlan(64, 64, 128, 4, 4, 4), TilesPlan(64, 64, 128, 1, 4, 4), 256),
    MOST_ROWS: _Shapes(TilesPlan(128, 64, 128, 4, 4, 3), None, 256),
}
"""Shapes by the maximum number of rows of x."""
_WIDE = TilesPlan(128, 256, 128, 1, 8, 3)
"""Tiles for many rows and many outputs."""


@functools.cache
def choose(
    num: int, size_out: int, size_in: int, parts: int, unit: int, *, high: bool = False, fixed: bool = False
) -> WholeRows | TilesPlan | None:
    """Return the plan for `num` rows of x and a weight [size_out, size_in] with `unit` columns per unit;
    `high` says whether its codes have high bits. `parts` is 2 for gate and up. None: unpack the weight, or
    multiply gate and up as one weight. `fixed` plans, for the batch-invariant mode, add in one order for any
    `num`."""
    units = triton.cdiv(size_in, unit)
    if fixed:
        height = 16 if num <= 16 else 32 if num <= 32 else 64 if num <= 64 or parts == 2 else 128
        return TilesPlan(height, 64, 128 * unit // 32, 1, 4, 3) if num else None
    if num == 1 and parts == 2 and unit == 16 and units <= 256:
        return _WHOLE_GATED_BYTES
    if num == 1 and units <= _MOST_UNITS:
        return next(plan for most, plan in _WHOLE[unit, high].items() if units <= most)
    if not 0 < num <= MOST_ROWS:
        return None
    one, gated, programs = next(shapes for most, shapes in _SHAPES.items() if num <= most)
    if parts == 2 and gated is None:
        return None
    plan = gated if parts == 2 and gated is not None else one
    tiles = triton.cdiv(num, plan.num) * triton.cdiv(size_out // parts, plan.rows)
    if num > 64 and tiles > 400:
        plan, most = _WIDE, 1
    else:
        longer = 2 if size_in > 8192 and num <= 32 else 1
        most = min(plan.splits, longer * programs // tiles, size_in // 512)
    return plan._replace(splits=1 << max(most, 1).bit_length() - 1, length=plan.length * unit // 32)
