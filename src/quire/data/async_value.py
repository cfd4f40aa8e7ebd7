"""A value that another thread computes."""

import threading
from collections.abc import Callable


class AsyncValue:
    """A value that is completed later, by another thread. Threads can wait for it, and one callback can
    follow it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Lock()
        self._ready.acquire()
        self._next: Callable[[], None] | None = None
        self.is_ready = False

    def then(self, follow: Callable[[], None]) -> None:
        """Call `follow` once the value is complete: in the thread that completes it, or now if it is complete
        already."""
        with self._lock:
            if not self.is_ready:
                self._next = follow
                return
        follow()

    def arrive(self) -> None:
        """Mark the value as complete, or as failed."""
        with self._lock:
            self.is_ready = True
        if self._next is not None:
            self._next()
        self._ready.release()

    def wait(self) -> None:
        with self._ready:
            pass
