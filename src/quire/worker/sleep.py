"""Sleep: the memory of weights given back, and taken again."""

import contextlib
import ctypes
import mmap

import psutil
import torch
from torch import Tensor, nn

from quire.logs import get_logger
from quire.system.process import collect_all

log = get_logger(__name__)


class OffloadedWeights:
    """The weights of a model in host memory, their own given back.

    Storages are emptied and filled again in place: whoever holds a weight or a part of one, kernels and their
    abilities included, holds it afterwards as before. But it lies elsewhere then, and what knows addresses
    has to be made anew.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        found = {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}
        self._storages = [storage for storage in found.values() if storage.nbytes()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.num_bytes = sum(self._sizes)
        self._host = _host_memory(self.num_bytes)  # before anything is given up
        self._is_pinned = pin(self._host)
        for storage, part in zip(self._storages, self._host.split(self._sizes), strict=True):
            part.copy_(_bytes_of(storage), non_blocking=self._is_pinned)
        _wait()
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Back to the device. Where there is no room for all of them, it can be tried again."""
        for storage, part in zip(self._storages, self._host.split(self._sizes), strict=True):
            if not storage.nbytes():
                storage.resize_(len(part))
            _bytes_of(storage).copy_(part, non_blocking=self._is_pinned)
        _wait()
        self.drop()

    def drop(self) -> None:
        """Let go of the copy."""
        if self._is_pinned:
            unpin(self._host)
        self._is_pinned, self._storages = False, []


def _host_memory(num_bytes: int) -> Tensor:
    """In large pages, which are pinned in a fraction of the time."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pin(memory: Tensor) -> bool:
    """Have the device read and write it by itself, which is several times as fast. torch's own pinned memory
    would take up to twice the room, and keep it."""
    if not torch.cuda.is_available() or not len(memory):
        return False
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
    if failed:
        with contextlib.suppress(torch.AcceleratorError, torch.OutOfMemoryError):
            torch.ones(1, device="cuda")  # CUDA keeps the error for whoever launches something next
        log.warning("%d bytes of host memory cannot be pinned (CUDA error %d)", len(memory), failed)
    return not failed


def unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def give_back(device: torch.device) -> None:
    """Let the system have what nobody holds any more."""
    collect_all()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def used_bytes(device: torch.device) -> int:
    """Of the device by this process; of a CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved()
    return int(psutil.Process().memory_info().rss)
