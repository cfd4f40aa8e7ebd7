"""Coming: what another thread is making."""

import threading
from collections.abc import Callable


class AsyncValue:
    """Something that is being made, for those who wait for it and for what is to follow at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there = threading.Lock()
        self._there.acquire()
        self._next: Callable[[], None] | None = None
        self.is_there = False

    def then(self, follow: Callable[[], None]) -> None:
        """Done once, by who has made it; here, if it is there already."""
        with self._lock:
            if not self.is_there:
                self._next = follow
                return
        follow()

    def arrive(self) -> None:
        """It is there, or will never be."""
        with self._lock:
            self.is_there = True
        if self._next is not None:
            self._next()
        self._there.release()

    def wait(self) -> None:
        with self._there:
            pass
