"""Beside: a thread that does one thing while its owner does another."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import finalize

Work = Callable[[], None]


class Beside:
    """One job at a time, for work that lets go of the interpreter."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._errors: list[BaseException] = []
        self._begun.acquire()
        self._ended.acquire()
        given = self._jobs, self._begun, self._ended, self._errors
        threading.Thread(target=_do_all, args=given, name=name, daemon=True).start()
        finalize(self, self._jobs.put, None)

    def begin(self, work: Work) -> None:
        """Returns when it has begun: a thread that is not waited for would get the interpreter much later."""
        self._jobs.put(work)
        self._begun.acquire()

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self._ended.acquire()
        if self._errors:
            raise self._errors.pop()


def _do_all(
    jobs: "SimpleQueue[Work | None]",
    begun: threading.Lock,
    ended: threading.Lock,
    errors: list[BaseException],
) -> None:
    """Knows nothing of who asks, who may thus go away."""
    while (work := jobs.get()) is not None:
        begun.release()
        try:
            work()
        except BaseException as error:  # raised by who waits
            errors.append(error)
        work = None
        ended.release()
