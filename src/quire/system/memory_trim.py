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
    """Returns the unused memory of the heap to the system when there is much more of it than at its lowest.

    glibc returns only the end of a heap to the system. After a burst of long request bodies or grammars,
    small blocks that are still in use prevent the return of hundreds of MiB below them, in one heap per
    thread.
    """

    def __init__(
        self, spare_bytes: int, *, num_unused_bytes: Callable[[], int], trim: Callable[[], object]
    ) -> None:
        """Create a trimmer. It trims the heap when its unused bytes exceed the lowest number since the
        last trim by `spare_bytes`. `num_unused_bytes` returns the bytes in memory that the allocator has
        not handed out; some of them can never be returned."""
        self._spare_bytes = spare_bytes
        self._num_unused_bytes, self._trim = num_unused_bytes, trim
        self._least_bytes = num_unused_bytes()
        """Lowest number of unused bytes since the last trim."""

    def look(self) -> None:
        num_unused = self._num_unused_bytes()
        self._least_bytes = min(self._least_bytes, num_unused)
        if num_unused - self._least_bytes > self._spare_bytes:
            self._trim()
            self._least_bytes = self._num_unused_bytes()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_S):
            self.look()

    def start(self) -> None:
        """Start a thread that checks the heap every ten seconds."""
        threading.Thread(target=self._run, name="quire-trim", daemon=True).start()


def _num_unused_bytes(info: _Mallinfo2) -> int:
    """Return the resident bytes of this process that the allocator has not handed out. The allocator's own
    count of free bytes also includes memory that was returned to the system."""
    with open("/proc/self/statm", "rb") as statm:
        _, resident, shared = map(int, statm.read().split()[:3])
    return (resident - shared) * mmap.PAGESIZE - int(info.uordblks) - int(info.hblkhd)


def trim_memory(spare_bytes: int) -> None:
    """Start a thread that returns freed memory above `spare_bytes` to the system, unless MALLOC_ variables
    are set."""
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallinfo2") and os.path.exists("/proc/self/statm")
    if not known or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc.mallinfo2.restype = _Mallinfo2
    trimmer = MemoryTrimmer(
        spare_bytes,
        num_unused_bytes=lambda: _num_unused_bytes(libc.mallinfo2()),
        trim=lambda: libc.malloc_trim(0),
    )
    trimmer.start()
