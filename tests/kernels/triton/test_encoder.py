"""Tests of bidirectional attention on a GPU against one sequence after the other."""

import itertools

import numpy as np
import pytest
import torch
from interpreter import more

from quire.kernels.reference.encoder import HEIGHTS, Spans, attend, rotate_in_place, tiles_of
from quire.kernels.triton import encoder

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TYPES = [torch.float32, *([torch.float16, torch.bfloat16] if CUDA else [])]


SHAPES = [
    *((2, 16, window) for window in (None, 5, 64)),
    *((3, 24, window) for window in (None, 5)),
    *((1, dim, None) for dim in (8, 20, 64, 72, 80, 88, 96, 128, 160)),
    (1, 80, 64),
]
BRANCHES = [(2, 16, 64, 64), (3, 24, 5, 128), (1, 72, None, 64), (1, 160, None, 128)]
"""Heads that do and do not fill a tile, whole and in two parts, with and without a window; each
tile height.
"""
OTHERS = [(*shape, height) for shape, height in itertools.product(SHAPES, HEIGHTS)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "window", "height"),
    [*BRANCHES, *more(*(case for case in OTHERS if case not in BRANCHES))],
)
def test_ragged_sequences(heads: int, dim: int, window: int | None, dtype: torch.dtype, height: int) -> None:
    """Check for dimensions beyond the head and for wrongly masked key tiles."""
    torch.manual_seed(0)
    lens = np.array([1, 130, 7, 64, 65], np.int32)
    qkv = torch.randn(int(lens.sum()), 3, heads, dim, device=DEVICE).to(dtype)
    spans = Spans(lens.tolist(), torch.from_numpy(tiles_of(lens, height)).to(DEVICE), height)
    actual = encoder.attend(*qkv.unbind(1), spans, window)
    expected = attend(*qkv.unbind(1), spans, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_heads_are_split_into_powers_of_two() -> None:
    """Check that a head of 80 does not cost as much as one of 128."""
    dims = (16, 24, 72, 80, 88, 96, 104, 160)
    assert [encoder.parts_of(dim) for dim in dims] == [
        *((16, 0), (32, 0), (64, 16), (64, 16), (64, 32), (64, 32), (128, 0), (128, 32))
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim", "half"), [(6, 80, 40), (3, 72, 36), (2, 16, 4)])
def test_heads_are_rotated_in_place(heads: int, dim: int, half: int, dtype: torch.dtype) -> None:
    """Check that values and dimensions beyond the angles are unchanged, and that each token uses its own
    angles.
    """
    torch.manual_seed(0)
    actual = torch.randn(11, heads + 2, dim, device=DEVICE).to(dtype)
    expected, angles = actual.clone(), torch.randn(11, half, device=DEVICE)
    encoder.rotate(actual[:, :heads], (angles.cos(), angles.sin()))
    rotate_in_place(expected[:, :heads], (angles.cos(), angles.sin()))
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
