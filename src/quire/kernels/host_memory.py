"""Host memory of large tensors that are copied to and from the device."""

import contextlib
import mmap
from weakref import finalize

import torch
from torch import Tensor

from quire.logs import get_logger

log = get_logger(__name__)

_pinned: set[int] = set()
"""Addresses of pinned memory. CUDA must forget them before the system gives them to other memory: copies to
and from that would use the old pages."""


def host_memory(num_bytes: int) -> Tensor:
    """Return host memory in huge pages, which are pinned much faster. It is unpinned when it is freed."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    finalize(memory, _unpin, tensor.data_ptr()).atexit = False
    return tensor


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
    else:
        _pinned.add(memory.data_ptr())
    return not failed


def unpin(memory: Tensor) -> None:
    _unpin(memory.data_ptr())


def _unpin(address: int) -> None:
    if address in _pinned:
        _pinned.remove(address)
        torch.cuda.synchronize()  # copies may still use it
        torch.cuda.cudart().cudaHostUnregister(address)
