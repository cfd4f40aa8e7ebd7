"""Returns freed memory to the system after bursts, for glibc's allocator."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

INTERVAL_S = 10.0


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
        + ("uordblks", "fordblks", "keepcost")
    ]


class MemoryTrimmer:
    """Trims the heap when the process has grown since the last time and much of the heap is free.

    glibc returns only the end of a heap to the system. After a burst of long bodies or grammars, small blocks
    that live on keep hundreds of MiB below them, in one heap per thread. The allocator counts returned memory
    as free, also when a later burst has used it again, so that only the size of the process tells.
    """

    def __init__(
        self,
        spare_bytes: int,
        *,
        num_free_bytes: Callable[[], int],
        num_resident_bytes: Callable[[], int],
        trim: Callable[[], object],
    ) -> None:
        """`spare_bytes` of free memory are kept for the next burst. `num_free_bytes` returns the free bytes
        of the heap, `num_resident_bytes` those of this process in memory."""
        self._spare_bytes = spare_bytes
        self._num_free_bytes, self._num_resident_bytes = num_free_bytes, num_resident_bytes
        self._trim = trim
        self._least_bytes = num_resident_bytes()
        """Least bytes in memory since the last time, at which all that was free had been returned."""

    def look(self) -> None:
        num_resident = self._num_resident_bytes()
        self._least_bytes = min(self._least_bytes, num_resident)
        has_grown = num_resident - self._least_bytes > self._spare_bytes
        if has_grown and self._num_free_bytes() > self._spare_bytes:
            self._trim()
            self._least_bytes = self._num_resident_bytes()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_S):
            self.look()

    def start(self) -> None:
        """Look at the heap every ten seconds, in a thread."""
        threading.Thread(target=self._run, name="quire-trim", daemon=True).start()


def _num_anonymous_bytes() -> int:
    """Return the bytes of this process in memory without shared mappings, such as the KV cache."""
    with open("/proc/self/statm", "rb") as statm:
        _, resident, shared = statm.read().split()[:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def trim_memory(spare_bytes: int) -> None:
    """Return freed memory above `spare_bytes` to the system from now on, unless MALLOC_ variables are set."""
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallinfo2") and os.path.exists("/proc/self/statm")
    if not known or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc.mallinfo2.restype = _Mallinfo2
    trimmer = MemoryTrimmer(
        spare_bytes,
        num_free_bytes=lambda: int(libc.mallinfo2().fordblks),
        num_resident_bytes=_num_anonymous_bytes,
        trim=lambda: libc.malloc_trim(0),
    )
    trimmer.start()
