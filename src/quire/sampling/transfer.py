"""Transfers between host arrays and the device of the logits."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def take_rows(tensor: Tensor, at: NDArray[np.intp]) -> Tensor:
    """Return the rows `at` (increasing, unique); the tensor itself, not a copy, if `at` has all rows."""
    return tensor if len(at) == len(tensor) else tensor.index_select(0, to_device(at, tensor.device))
