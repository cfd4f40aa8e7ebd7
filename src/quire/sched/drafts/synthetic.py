"""Forced acceptance, for measuring: so many drafts are right as a benchmark wants, whatever they are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.data.plan import Ints

_STEP = np.uint64(0x9E3779B97F4A7C15)


def num_accepted(seeds: NDArray[np.int64], positions: Ints, num_drafts: Ints, rates: Sequence[float]) -> Ints:
    """How many drafts of each row are accepted, a function of its seed and of the position of the first.

    `rates` says by place in the draft how often it and all before it are accepted, so that none is above the
    one before it.
    """
    draws = _uniform(seeds.astype(np.uint64) ^ (positions.astype(np.uint64) + np.uint64(1)) * _STEP)
    accepted: Ints = (draws[:, None] < np.asarray(rates, np.float64)).sum(1, dtype=np.int32)
    return np.minimum(accepted, num_drafts)


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers from 0 to below 1 out of 64 bits each (the finisher of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
