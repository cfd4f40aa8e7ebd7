"""How products with packed weights and with weights in groups are cut, as measured on an H200 in graphs of
products with different weights."""

import functools

import triton

from quire.kernels.triton.matmul import Tiles
from quire.kernels.triton.packed_rows import Whole

MOST_ROWS = 512
"""Of x that are multiplied in tiles; with more a weight is unpacked first."""
_MOST_UNITS = 2048
"""That a program holds of a row."""


@functools.cache
def choose(num: int, size_out: int, size_in: int, parts: int, unit: int) -> Whole | Tiles | None:
    """For `num` rows of x and a weight of this shape, of units of so many columns; `parts` is 2 for gate and
    up. None: the weight is better unpacked."""
    units = triton.cdiv(size_in, unit)
    if num == 1 and units <= _MOST_UNITS:
        return Whole(528, 4 if units <= 128 else 8)
    if not 0 < num <= MOST_ROWS:
        return None
    height = min(max(triton.next_power_of_2(num), 16), 128)
    length = 128 if unit == 32 else 64
    return Tiles(height, 128, length, 1, 8, 3)
