"""Tests of how masks of grammars are packed for the kernels."""

import numpy as np

from quire.data.step_plan import Masks
from quire.sampling.constrain import pack


def test_masks_of_drafts_are_placed_at_their_own_samples() -> None:
    """Row 3 has two drafts and three masks; row 0 has one mask."""
    rows = np.array([0, 3, 3, 3], np.int32)
    bits = np.arange(8, dtype=np.uint32).reshape(4, 2)
    places = np.array([3, -1, -1, 0], np.int32)
    packed = np.zeros((4, 3), np.int32)
    pack(Masks(rows, bits, np.array([0, 0, 1, 2], np.int32)), places, packed)
    assert packed[:, 0].tolist() == [3, 0, 1, 2]
    assert packed[:, 1:].tolist() == bits.tolist()
    pack(Masks(rows[:2], bits[:2]), places, packed[:2])
    assert packed[:2, 0].tolist() == [3, 0]
