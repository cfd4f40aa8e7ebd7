"""Ops: the operations of a model between its GEMMs, and the choice of their implementation by device."""

import functools

import torch

from quire.kernels.cpu import native
from quire.kernels.reference.ops import HeadEntry, HeadNorms, LoRAHeads, Reference
from quire.registry import LazyTable

__all__ = ["HeadEntry", "HeadNorms", "LoRAHeads", "Ops", "choose"]

IMPLEMENTATIONS = LazyTable(
    "kernels",
    {
        "cpu": "quire.kernels.cpu.ops:CPUOps",
        "reference": "quire.kernels.reference.ops:Reference",
        "triton": "quire.kernels.triton.ops:TritonOps",
    },
)


Ops = Reference
"""Interface of the implementations for all devices: the methods of the reference."""


@functools.cache
def choose(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the fastest implementation for models of `dtype` on `device`."""
    name = "triton" if device.type == "cuda" else "reference"
    ops: Ops = IMPLEMENTATIONS["cpu" if native.serves(device, dtype) else name]()
    return ops
