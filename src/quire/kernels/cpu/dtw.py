"""Dynamic time warping in C (`csrc/dtw.c`). The reference in numpy is `worker/multimodal/timestamps.py`."""

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.cpu.native import Kernel

_warp = Kernel("quire_warp", "costs total came begins", "tokens states")


def align(costs: NDArray[np.float64]) -> list[int]:
    """Return for each token the index of the encoder state at which it begins, by the cheapest monotonic path
    through `costs` [tokens, states]. It gives the time of each transcribed word."""
    num_tokens, num_states = costs.shape
    total = torch.empty(num_states + 1, dtype=torch.float32)
    came = torch.empty(num_tokens + 1, num_states + 1, dtype=torch.int8)
    begins = torch.empty(num_tokens, dtype=torch.int64)
    contiguous = torch.from_numpy(np.ascontiguousarray(costs, np.float64))
    _warp((contiguous, total, came, begins), num_tokens, num_states)
    return begins.tolist()
