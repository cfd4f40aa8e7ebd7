"""Host memory of large tensors that are copied to and from the device."""

import contextlib
import mmap

import torch
from torch import Tensor

from quire.logs import get_logger

log = get_logger(__name__)


def host_memory(num_bytes: int) -> Tensor:
    """Return host memory in huge pages, which are pinned much faster."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def pin(memory: Tensor) -> bool:
    """Pin memory, which makes copies several times as fast. Pinned memory of torch would take up to twice the
    space, and keep it."""
    if not torch.cuda.is_available() or not len(memory):
        return False
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
    if failed:
        with contextlib.suppress(torch.AcceleratorError, torch.OutOfMemoryError):
            torch.ones(1, device="cuda")  # CUDA would report the error at the next launch
        log.warning(
            "%d bytes of host memory cannot be pinned (CUDA error %d): copies are slower", len(memory), failed
        )
    return not failed


def unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
