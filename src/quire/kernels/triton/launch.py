"""Kernels that follow each other closely: the next is already on the chip while the last one ends."""

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def overlap() -> bool:
    """Whether kernels are launched with `launch_pdl`, ahead of the end of the one before (Hopper and later).

    Such a kernel calls `follow` before it reads what others wrote or writes what others read; what no kernel
    ever writes, such as weights, it may read before.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def num_processors() -> int:
    """Multiprocessors of the device."""
    if not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties().multi_processor_count


@triton.jit
def follow(OVERLAP: tl.constexpr) -> tl.tensor:
    """Let the next kernel come, and wait until the one before has ended and what it wrote can be seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
