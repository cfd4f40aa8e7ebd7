"""Thread pools in which torch uses one thread per worker."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_lock = threading.Lock()


def single_threads(most: int, name: str) -> ThreadPoolExecutor:
    """Return a pool with single-threaded torch in each thread; by default each would use all cores. All
    threads have started when it returns."""
    count = min(most, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, name, initializer=_use_one_thread)
    barrier = threading.Barrier(count)
    for begun in [pool.submit(barrier.wait) for _ in range(count)]:
        begun.result()
    return pool


def _use_one_thread() -> None:
    # The setting applies to the thread that makes it and to threads started later.
    with _lock:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(count,))
        restore.start()
        restore.join()
