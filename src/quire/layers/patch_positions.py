"""Positions of the patches of an image: 2D RoPE, and ids in a square table of learned positions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.reference.encoder import Angles


def grid_places(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return row and column of each patch of a grid (rows, columns): [patches, 2], row by row."""
    return torch.cartesian_prod(*(torch.arange(count, device=device) for count in grid))


def axial_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the frequencies [head_dim / 4] of 2D RoPE, which are the same for rows and columns."""
    half = head_dim // 2
    return theta ** -(torch.arange(0, half, 2, device=device, dtype=torch.float32) / half)


def axial_rope(places: Tensor, frequencies: Tensor) -> Angles:
    """Return cosines and sines of 2D RoPE. One half of a head rotates by the first column of `places` [T, 2],
    such as the row of a patch, the other half by the second column."""
    angles = (places[:, :, None] * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def resize_positions(table: Tensor, grid: tuple[int, int], **options: Any) -> Tensor:
    """Return the learned positions of a grid of patches, [patches, hidden], interpolated from a table [rows,
    columns, hidden]. `options` are those of `F.interpolate`."""
    if grid != table.shape[:2]:
        wide = table.float().permute(2, 0, 1)[None]
        table = F.interpolate(wide, grid, **options)[0].permute(1, 2, 0).to(table.dtype)
    return table.flatten(0, 1)


def position_ids(starts: Sequence[Tensor], side: int) -> Tensor:
    """Return the position id of each patch in a table of `side` x `side` positions. `starts` holds the starts
    of all rows and of all columns of patches, as fractions of the image's side in float32."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (torch.bucketize(fractions, borders, right=True) for fractions in starts)
    return (rows[:, None] * side + columns).flatten()
