"""Threads that read and copy side by side, each in itself."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_lock = threading.Lock()


def single_threads(most: int, name: str) -> ThreadPoolExecutor:
    """A pool in whose threads torch works alone, where each would have as many further ones as there are
    cores. All of them have begun when it returns."""
    count = min(most, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, name, initializer=_be_alone)
    together = threading.Barrier(count)
    for begun in [pool.submit(together.wait) for _ in range(count)]:
        begun.result()
    return pool


def _be_alone() -> None:
    # A number that is set is of the thread that sets it, and of those who come after.
    with _lock:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        for_others = threading.Thread(target=torch.set_num_threads, args=(count,))
        for_others.start()
        for_others.join()
