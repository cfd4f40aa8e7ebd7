"""Beside: a thread that does one thing while its owner does another."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from weakref import finalize

Work = Callable[[], None]
_SWITCH_S = 1e-4
"""After which who comes back for the interpreter gets it, while somebody works beside. Python's own 5 ms are
longer than a step: whoever waits for the work would wait until its owner has nothing else to do."""


class MaskThread:
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
        self._jobs.put(partial(_soon, work, sys.getswitchinterval()))
        self._begun.acquire()

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self._ended.acquire()
        if self._errors:
            raise self._errors.pop()


def _soon(work: Work, usual_s: float) -> None:
    """Have it end as soon as it is done."""
    sys.setswitchinterval(min(usual_s, _SWITCH_S))
    try:
        work()
    finally:
        if usual_s > _SWITCH_S:  # else somebody else works beside, and sets it back
            sys.setswitchinterval(usual_s)


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
