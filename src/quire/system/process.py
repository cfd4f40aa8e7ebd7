"""Settings of processes and threads: start of child processes, OpenMP, garbage collector, allocator."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from quire.logs import name_process

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
SPARE_BYTES = 64 << 20
"""Bytes of freed memory that a process keeps for later requests."""
_SWITCH_S = 0.001
"""Seconds after which a thread that waits for the GIL interrupts the thread that holds it."""
_is_tuned = False
"""Whether `tune_garbage_collector` was called. Otherwise this module freezes no objects: that would keep an
engine in memory that the user's program drops later."""
_MAX_FILES = 1 << 20
"""Limit of open files: containers may allow a billion, and programs that walk all descriptors would take
minutes."""


def parent_age_s() -> float:
    """Return the seconds since the parent of this process, such as a supervisor, was started."""
    import psutil  # here, since only the first API process calls this

    return time.time() - psutil.Process(os.getppid()).create_time()


def adopt(role: str) -> None:
    """Set up this child process: give it the title `role`, let it die with its parent (on Linux), and
    leave SIGINT to its parent."""
    from tqdm import tqdm  # here, since the supervisor shows no progress

    name_process(role)
    tqdm.set_lock(threading.RLock())  # the default is a semaphore that a killed process leaks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, f"quire:{role}".encode()[:15], 0, 0, 0)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # the parent died before prctl
            os._exit(1)


@contextlib.contextmanager
def main_left_out() -> Iterator[None]:
    """Keep processes that are spawned within this context from running the user's script, which may have no
    `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    before = {name: getattr(main, name, None) for name in ("__spec__", "__file__")}
    for name in before:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(main, name, value)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT in this thread within the context, and for good in child processes that start there.
    Otherwise a Ctrl-C during their imports prints a traceback for each of them. Multiprocessing's resource
    tracker is started first: its start with the first child process would unblock SIGINT again."""
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, also for later children. The soft limit is often
    1,024, and each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def limit_thread_spinning() -> None:
    """Let OpenMP threads that wait at a barrier sleep after 2,000 spins. Must be called before torch is
    imported.

    By default, threads spin for milliseconds at each of the 300 barriers of a decode step. On a busy machine,
    this takes CPU time from the thread that they wait for. Measured with the packaged model beside a busy
    process, a step takes 14 ms with 500 to 2,000 spins, and 19 to 27 ms with 20,000. On an idle machine,
    20,000 spins are at most 6 % faster.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


@contextlib.contextmanager
def imports_frozen() -> Iterator[None]:
    """Import the modules of this context without garbage collection. The objects that they make last as long
    as the process, so they are not collected later either.

    The imports of a core process took 1.72 s instead of 1.95, those of an API process 0.98 s instead of 1.14.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_garbage_collector() -> None:
    """Freeze the objects that exist at startup, so that they are not collected again, and collect less
    often."""
    global _is_tuned
    _is_tuned = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def tune_allocator() -> None:
    """Keep up to 64 MiB of freed memory for the next request, unless MALLOC_ variables are set. By default
    glibc returns pieces above 128 KiB to the system, and gets them again page by page.

    Receiving a body of 660 kB took 0.53 ms of CPU instead of 1.12, a body of 9.4 MB 6.3 ms instead of 16.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        libc.mallopt(_M_TRIM_THRESHOLD, SPARE_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, SPARE_BYTES // 2)


def shorten_thread_switches() -> None:
    """Let the event loop of an API process interrupt other threads after 1 ms instead of 5. The loop releases
    the GIL several times in a request, and waits to get it back while another thread reads a long request
    body.

    Beside such a thread `/health` took 2.3 ms instead of 6.2, and the thread was not slower.
    """
    sys.setswitchinterval(_SWITCH_S)


def all_objects() -> list[Any]:
    """Return all objects that the garbage collector tracks, including those that this process has frozen."""
    if not _is_tuned:
        return gc.get_objects()
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    return objects


def collect_all() -> None:
    """Collect garbage, including objects that this process has frozen, after something large was dropped."""
    if not _is_tuned:
        gc.collect()
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
