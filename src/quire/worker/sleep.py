"""Sleep mode: frees the memory of weights and restores it."""

import contextlib
import ctypes

import psutil
import torch
from torch import nn

from quire.kernels.host_memory import host_memory, pin, unpin
from quire.loader.offload import storage_bytes
from quire.system.process import collect_all


class OffloadedWeights:
    """The weights of a model in host memory, with their device memory freed.

    Storages are emptied and refilled in place, so that references to weights, or to parts of them, stay
    valid. But their addresses change: CUDA graphs, which contain addresses, must be captured again."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        storages = {storage.data_ptr(): storage for storage in (x.untyped_storage() for x in tensors)}
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.num_bytes = sum(self._sizes)
        self._host = host_memory(self.num_bytes)  # before anything is freed
        self._is_pinned = pin(self._host)
        for storage, part in zip(self._storages, self._host.split(self._sizes), strict=True):
            part.copy_(storage_bytes(storage), non_blocking=self._is_pinned)
        _wait()
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy the weights back to the device. If memory runs out, this can be called again."""
        for storage, part in zip(self._storages, self._host.split(self._sizes), strict=True):
            if not storage.nbytes():
                storage.resize_(len(part))
            storage_bytes(storage).copy_(part, non_blocking=self._is_pinned)
        _wait()
        self.drop()

    def drop(self) -> None:
        if self._is_pinned:
            unpin(self._host)
        self._is_pinned, self._storages = False, []


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_memory(device: torch.device) -> None:
    """Return unused memory to the operating system and the device."""
    collect_all()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def used_bytes(device: torch.device) -> int:
    """Return the bytes that this process uses of the device; on a CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved()
    return int(psutil.Process().memory_info().rss)
