"""Tests of the settings of the garbage collector, of threads and of child processes."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from quire.system.process import all_objects, collect_all, imports_frozen, shorten_thread_switches


class Circle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("call", [collect_all, all_objects])
def test_objects_stay_collectable_beside_frozen_ones(call: Callable[[], object]) -> None:
    """Catches an engine that stays in memory after its owner has dropped it, because Python or the user froze
    other objects before."""
    gc.freeze()
    circle = Circle()
    call()
    alive = weakref.ref(circle)
    del circle
    gc.collect()
    assert alive() is None


def test_garbage_is_collected_again_after_imports() -> None:
    """Catches a process that never collects garbage after an import has failed."""
    num_before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), imports_frozen():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > num_before
    finally:
        gc.unfreeze()


def test_waiting_threads_interrupt_others_sooner() -> None:
    """Catches an event loop that waits 5 ms for the GIL at each system call beside a busy thread."""
    usual_s = sys.getswitchinterval()
    try:
        shorten_thread_switches()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(usual_s)


FIRST_CHILD = """
import multiprocessing, signal
from quire.system.process import interrupts_held

code = "import signal; raise SystemExit(7 * (signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
with interrupts_held():
    process.start()
process.join()
assert process.exitcode == 7, process.exitcode
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_interrupt_does_not_reach_the_first_child() -> None:
    """Catches the resource tracker of multiprocessing, which admits SIGINT again when it starts."""
    subprocess.run([sys.executable, "-c", FIRST_CHILD], check=True, timeout=120)
