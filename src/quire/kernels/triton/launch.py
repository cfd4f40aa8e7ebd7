"""Kernels that follow each other closely: the next is already on the chip while the last one ends."""

import functools

import torch
import triton
import triton.language as tl

MOST_ROWS, _MOST = 128, 2**18
"""Up to so many rows, and so many numbers of a model's width in all of them, the kernels of a step are ours;
beside the library's products an early launch only costs."""


def overlap(num_rows: int, width: int = _MOST // 16) -> bool:
    """Whether kernels for so many rows are launched with `launch_pdl`, ahead of the end of the one before.

    `width` is the model's; around the vocabulary's product the kernels are ours up to 16 rows.
    Such a kernel calls `follow` before it reads what others wrote or writes what others read; what no kernel
    ever writes, such as weights, it may read before.
    """
    return num_rows <= MOST_ROWS and num_rows * width <= _MOST and _can_overlap()


@functools.cache
def _can_overlap() -> bool:
    """Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def follow(OVERLAP: tl.constexpr) -> tl.tensor:
    """Let the next kernel come, and wait until the one before has ended and what it wrote can be seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
