"""MaskThread: a background thread that runs one job at a time, for example to fill grammar masks."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from weakref import finalize

Work = Callable[[], None]
_SWITCH_S = 1e-4
"""Thread switch interval of the interpreter, in seconds, while a job runs. Python's default of 5 ms is longer
than a step, so the job would wait for the GIL until the thread that started it is idle."""


class MaskThread:
    """A background thread that runs one job at a time, for work that releases the GIL, such as filling
    grammar masks."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._errors: list[BaseException] = []
        self._begun.acquire()
        self._ended.acquire()
        args = self._jobs, self._begun, self._ended, self._errors
        threading.Thread(target=_run_jobs, args=args, name=name, daemon=True).start()
        finalize(self, self._jobs.put, None)

    def begin(self, work: Work) -> None:
        """Start a job, and block until the thread runs it. Without this wait the thread would get the GIL
        much later."""
        self._jobs.put(partial(_run_with_short_interval, work, sys.getswitchinterval()))
        self._begun.acquire()

    def wait(self) -> None:
        """Wait until the job is done and raise its error, if any."""
        self._ended.acquire()
        if self._errors:
            raise self._errors.pop()


def _run_with_short_interval(work: Work, usual_s: float) -> None:
    """Run the job with a short thread switch interval, so that the thread that waits for it continues soon
    after its end; `usual_s` is the interval to restore."""
    sys.setswitchinterval(min(usual_s, _SWITCH_S))
    try:
        work()
    finally:
        if usual_s > _SWITCH_S:  # otherwise another job has set it and will restore it
            sys.setswitchinterval(usual_s)


def _run_jobs(
    jobs: "SimpleQueue[Work | None]",
    begun: threading.Lock,
    ended: threading.Lock,
    errors: list[BaseException],
) -> None:
    """Run the jobs of the queue until None arrives. The thread has no reference to its `MaskThread`, so that
    the latter can be deleted."""
    while (work := jobs.get()) is not None:
        begun.release()
        try:
            work()
        except BaseException as error:  # raised again by wait()
            errors.append(error)
        work = None
        ended.release()
