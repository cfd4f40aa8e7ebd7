"""Dynamic time warping in C (`csrc/dtw.c`). The reference in numpy is `worker/multimodal/timestamps.py`."""

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Kernel, structure

_warp = Kernel("quire_warp")
_Job = structure("costs total came begins", "tokens states")


def align(costs: NDArray[np.float64]) -> list[int]:
    """Return the encoder state at which each token begins, from the costs [tokens, states]."""
    costs = np.ascontiguousarray(costs, np.float64)
    num_tokens, num_states = costs.shape
    total = np.empty(num_states + 1, np.float32)
    came = np.empty((num_tokens + 1, num_states + 1), np.int8)
    begins = np.empty(num_tokens, np.int64)
    _warp(_Job(*(array.ctypes.data for array in (costs, total, came, begins)), num_tokens, num_states))
    return begins.tolist()
