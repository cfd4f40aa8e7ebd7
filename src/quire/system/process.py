"""Processes and threads: what a child process does first, and how threads wait."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading

from tqdm import tqdm

from quire.logs import name_process

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SPARE_BYTES = 64 << 20
_MAX_FILES = 1 << 20
"""Containers may allow a billion: programs that walk through all descriptors would take minutes."""


def adopt(role: str) -> None:
    """Name this process, let it die with its parent, and leave SIGINT to the supervisor."""
    name_process(role)
    tqdm.set_lock(threading.RLock())  # its own would be a semaphore that a killed process leaves behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, f"quire:{role}".encode()[:15], 0, 0, 0)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it died before the tie was made
            os._exit(1)


def raise_file_limit() -> None:
    """Let this process and its later children open as many files as the hard limit allows. The soft limit is
    often 1,024, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # not every system keeps to its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def calm_threads() -> None:
    """Let OpenMP's threads sleep soon when they wait for each other. Takes effect before torch is imported.

    By default they spin for milliseconds, which on a busy machine is time that the awaited thread does not
    get, at each of the 300 barriers of a decode step. Beside a busy process a step of the packaged model took
    14 ms with 500 to 2,000 turns and 19 to 27 ms with 20,000, which is 6 % faster at best on an idle machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def calm_collector() -> None:
    """What is there when a process begins to serve stays: the collector need not look at it again and again,
    nor as often at what comes and goes with requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def calm_allocator() -> None:
    """What was freed is kept for the next request, up to 64 MiB: glibc gives pieces of more than 128 KiB back
    to the system, and takes them again page by page. Unless the deployer has told it otherwise.

    To receive a body of 660 kB took 0.53 ms of CPU in place of 1.12, one of 9.4 MB 6.3 in place of 16.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        libc.mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _SPARE_BYTES // 2)


def collect_all() -> None:
    """Garbage among what stays, too: something large was given up."""
    is_calm = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_calm:
        gc.freeze()
