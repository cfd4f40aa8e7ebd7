"""Host arrays on their way to the device, for which nobody waits."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, behind what that does already; on a CPU it is the array itself. A GPU reads it
    out of pinned memory, which torch keeps until then."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
