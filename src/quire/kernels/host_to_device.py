"""Asynchronous copies of host arrays to the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def copy_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device, copied in stream order without waiting. On a CPU the tensor
    shares the array's memory. For a GPU the source is pinned memory, which torch keeps until the copy is
    done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
