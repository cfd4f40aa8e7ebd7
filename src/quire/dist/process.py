"""What every child process does first: a name, a tie to its parent, and quiet about Ctrl-C."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

from tqdm import tqdm

from quire.logs import name_process

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


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
