"""Returns freed memory to the system after bursts, for glibc's allocator."""

import ctypes
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
    """Trims the heap when much was freed since the last time.

    glibc returns only the end of a heap to the system. After a burst of long bodies or grammars, small blocks
    that live on keep hundreds of MiB below them, in one heap per thread.
    """

    def __init__(
        self, spare_bytes: int, *, num_free_bytes: Callable[[], int], trim: Callable[[], object]
    ) -> None:
        """`spare_bytes` of free memory are kept for the next burst. `num_free_bytes` returns the free bytes
        of the heap, which still include those that `trim` has returned to the system."""
        self._spare_bytes = spare_bytes
        self._num_free_bytes, self._trim = num_free_bytes, trim
        self._num_returned_bytes = 0
        """Free bytes that were returned and have not been used again."""

    def look(self) -> None:
        num_free = self._num_free_bytes()
        self._num_returned_bytes = min(self._num_returned_bytes, num_free)
        if num_free - self._num_returned_bytes > self._spare_bytes:
            self._trim()
            self._num_returned_bytes = self._num_free_bytes()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_S):
            self.look()

    def start(self) -> None:
        """Look at the heap every ten seconds, in a thread."""
        threading.Thread(target=self._run, name="quire-trim", daemon=True).start()


def trim_memory(spare_bytes: int) -> None:
    """Return freed memory above `spare_bytes` to the system from now on, unless MALLOC_ variables are set."""
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallinfo2") and hasattr(libc, "malloc_trim")
    if not known or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc.mallinfo2.restype = _Mallinfo2
    trimmer = MemoryTrimmer(
        spare_bytes,
        num_free_bytes=lambda: int(libc.mallinfo2().fordblks),
        trim=lambda: libc.malloc_trim(0),
    )
    trimmer.start()
