"""Processed items in the form in which vision encoders get them."""

import torch
from torch import Tensor

from quire.data.multimodal import TABLE, Arrays
from quire.worker.multimodal.encoder import pixel_values


def finished(arrays: Arrays | None) -> dict[str, Tensor]:
    assert arrays is not None
    tensors = {name: torch.from_numpy(array.numbers().copy()) for name, array in arrays.items()}
    table = tensors.pop(TABLE, torch.empty(0))
    return {name: pixel_values(tensor, table) for name, tensor in tensors.items()}


def patches(arrays: Arrays | None) -> Tensor:
    """Return patches as [steps, height, width, pixels of the frames of a patch]; a single frame is
    repeated."""
    pixels = finished(arrays)["pixels"]
    return pixels.flatten(4).repeat(1, 1, 1, 1, 2 * pixels.shape[5] // pixels.shape[4]).flatten(3)
