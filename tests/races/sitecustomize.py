"""Random delays in threads, event loops, connections and new processes, to find tests that depend on luck.

Every Python process with this folder in PYTHONPATH and QUIRE_RACES set imports this file when it starts:
`make races`. A test that fails with it has a race, or a time limit that a busy machine exceeds."""

import functools
import importlib.abc
import importlib.util
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

_SLEEP = time.sleep
_LONGEST_S = 0.4


def _delayed(
    call: Callable[..., Any], chance: float, pause: Callable[[float], None], *, after: bool = False
) -> Callable[..., Any]:
    """Return the function with a pause before or after some of its calls."""

    @functools.wraps(call)
    def delayed(*args: Any, **options: Any) -> Any:
        if not after:
            pause(chance)
        result = call(*args, **options)
        if after:
            pause(chance)
        return result

    return delayed


def _pauser(seed: str) -> Callable[[float], None]:
    generator = random.Random(f"{seed}, {os.getpid()}")

    def pause(chance: float) -> None:
        if generator.random() < chance:
            _SLEEP(generator.random() * _LONGEST_S)

    return pause


class _LateImports(importlib.abc.MetaPathFinder):
    """Delays functions of modules when they are imported: importing them here would slow every process."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        patch = self._patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _install(seed: str) -> None:
    pause = _pauser(seed)

    def event_loop(module: Any) -> None:
        loop = module.BaseEventLoop
        loop._run_once = _delayed(loop._run_once, 0.003, pause)
        run = loop.run_in_executor
        loop.run_in_executor = lambda self, pool, call, *args: run(
            self, pool, _delayed(call, 0.02, pause), *args
        )

    def connection(module: Any) -> None:
        module.Connection._recv_bytes = _delayed(module.Connection._recv_bytes, 0.005, pause, after=True)

    def process(module: Any) -> None:
        module.BaseProcess._bootstrap = _delayed(module.BaseProcess._bootstrap, 0.5, pause)

    thread: Any = threading.Thread
    thread.run = _delayed(thread.run, 0.4, pause)
    thread.start = _delayed(thread.start, 0.2, pause, after=True)
    time.sleep = _delayed(time.sleep, 0.1, pause, after=True)
    socket.create_connection = _delayed(socket.create_connection, 0.1, pause, after=True)
    patches: dict[str, Callable[[Any], None]] = {
        "asyncio.base_events": event_loop,
        "multiprocessing.connection": connection,
        "multiprocessing.process": process,
    }
    sys.meta_path.insert(0, _LateImports(patches))


if "QUIRE_RACES" in os.environ:
    _install(os.environ["QUIRE_RACES"])
