"""A value that another thread computes."""

import threading
from collections.abc import Callable


class AsyncValue:
    """Signals that a value is complete: threads can wait for the signal, and one callback can follow it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Lock()
        self._ready.acquire()
        self._next: Callable[[], None] | None = None
        self.is_ready = False

    def then(self, follow: Callable[[], None]) -> None:
        """Call `follow` in the thread that completes the value, or now if the value is complete already."""
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
