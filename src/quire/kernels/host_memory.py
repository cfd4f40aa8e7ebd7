"""Host memory of large tensors that are copied to and from the device."""

import contextlib
import mmap
import sys
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quire.logs import get_logger

log = get_logger(__name__)


class _Mapping(mmap.mmap):
    """A memory mapping that is unpinned before it is unmapped. CUDA would otherwise go on to use its pages in
    place of those of the next mapping at this address, pinned or not."""

    address = 0
    """Address of the pinned memory; 0: it is not pinned."""

    def __del__(self) -> None:
        if self.address:
            _unregister(self.address)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()
"""Mappings by their address."""


def host_memory(num_bytes: int) -> Tensor:
    """Return host memory in huge pages, which are pinned much faster. It may be freed while it is pinned."""
    memory = _Mapping(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    _mappings[tensor.data_ptr()] = memory
    return tensor


def pin(memory: Tensor) -> bool:
    """Pin memory, which makes copies several times as fast. Pinned memory of torch would take up to twice the
    space, and keep it."""
    if not torch.cuda.is_available() or not len(memory):
        return False
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
    if not failed and (mapping := _mappings.get(memory.data_ptr())) is not None:
        mapping.address = memory.data_ptr()
    if failed:
        with contextlib.suppress(torch.AcceleratorError, torch.OutOfMemoryError):
            torch.ones(1, device="cuda")  # CUDA would report the error at the next launch
        log.warning(
            "%d bytes of host memory cannot be pinned (CUDA error %d): copies are slower", len(memory), failed
        )
    return not failed


def unpin(memory: Tensor) -> None:
    if (mapping := _mappings.get(memory.data_ptr())) is not None:
        mapping.address = 0
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _unregister(address: int) -> None:
    """Unpin memory after the copies that use it; nothing does at the end of the process."""
    if not sys.is_finalizing():
        with contextlib.suppress(torch.AcceleratorError):  # a failed device copies nothing
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)
