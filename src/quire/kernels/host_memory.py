"""Host memory of large tensors that are copied to and from the device."""

import contextlib
import ctypes
import math
import mmap
import threading
from weakref import finalize, ref

import torch
from torch import Tensor

from quire.logs import get_logger

log = get_logger(__name__)

_PIN_BYTES = 64 << 20
"""Bytes that are pinned with one CUDA call in the background. CUDA calls of other threads wait meanwhile."""
_NUM_PIN_THREADS = 4
"""Number of threads that pin memory. On a host with an H200, four provide 8 GB/s of pages, one 3 GB/s."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE: provide the pages of a memory range without a change of their contents."""

_pinning = threading.Lock()
"""Lock of the threads that pin, so that CUDA calls of other threads wait for one of them, not for all."""
_pinned: set[int] = set()
"""Addresses of pinned memory. Memory is unpinned before the system reuses its addresses: otherwise copies to
and from these addresses would use the old pages."""


def host_memory(num_bytes: int) -> Tensor:
    """Allocate a tensor [num_bytes] uint8 in huge pages, which are pinned faster. It is not pinned yet; if it
    is pinned later, it is unpinned when it is freed."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Linux without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    finalize(memory, _unpin, tensor.data_ptr(), num_bytes).atexit = False
    return tensor


def pin(memory: Tensor) -> bool:
    """Pin a uint8 tensor, so that copies to and from a GPU are several times as fast; return whether this
    succeeded. torch's allocator of pinned memory would need up to twice the space, and not return it."""
    if not torch.cuda.is_available() or not len(memory):
        return False
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
    if failed:
        with contextlib.suppress(torch.AcceleratorError, torch.OutOfMemoryError):
            torch.ones(1, device="cuda")  # CUDA would report the error at the next launch
        log.warning(
            "%d bytes of host memory cannot be pinned (CUDA error %d): copies from and to the GPU "
            "are slower; check `ulimit -l`",
            len(memory),
            failed,
        )
    else:
        _pinned.add(memory.data_ptr())
    return not failed


def rows_pinned_together(row_bytes: int) -> int:
    """Return the number of rows of `row_bytes` bytes that `pin_in_background` pins with one call; they fill
    whole pages. CUDA refuses a copy to or from memory that several calls have pinned."""
    whole_pages = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)
    return max(_PIN_BYTES // (whole_pages * row_bytes), 1) * whole_pages


def pin_in_background(rows: Tensor) -> list[threading.Thread]:
    """Pin the memory of the tensor `rows` [n, size] in new threads, and return the threads. Copies of rows
    that are not pinned yet are slower. The threads end early if the tensor is freed."""
    if not torch.cuda.is_available() or not rows.numel():
        return []
    threads = [
        threading.Thread(target=_pin_parts, args=(ref(rows), first), name="pin-host-memory", daemon=True)
        for first in range(_NUM_PIN_THREADS)
    ]
    for thread in threads:
        thread.start()
    return threads


def _pin_parts(rows_ref: "ref[Tensor]", part: int) -> None:
    """Pin every fourth part of a tensor, from part number `part` on; each part has `rows_pinned_together`
    rows. Return early if the tensor is freed or a part cannot be pinned."""
    libc = ctypes.CDLL(None)
    while (rows := rows_ref()) is not None:
        count = rows_pinned_together(rows[0].nbytes)
        memory = rows[part * count : (part + 1) * count]
        if not len(memory):
            return
        # The system provides the pages here, and not while CUDA waits. Old Linux versions refuse this.
        libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _POPULATE_WRITE)
        with _pinning:
            if not pin(memory.view(-1)):
                return
        part += _NUM_PIN_THREADS
        del rows, memory


def unpin(memory: Tensor) -> None:
    _unpin(memory.data_ptr(), len(memory))


def _unpin(address: int, num_bytes: int) -> None:
    parts = [part for part in list(_pinned) if address <= part < address + max(num_bytes, 1)]
    if parts:
        torch.cuda.synchronize()  # copies may still use the memory
    for part in parts:
        _pinned.remove(part)
        torch.cuda.cudart().cudaHostUnregister(part)
