"""Loading of LoRA adapters on a worker while steps run."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import RequestError
from quire.executor.rpc import read_adapter
from quire.logs import get_logger
from quire.sched.lora import READ_S

log = get_logger(__name__)

T = TypeVar("T")

AT_ONCE = 4
"""Number of adapters that are read at the same time."""
MAX_HUNG = 16
"""Number of hanging reads (longer than READ_S) from which on new reads are refused. A hanging thread cannot
be ended."""
_LOOK_S = 1.0
_LAST_S = 5.0
"""Seconds that `close` waits for the operations in progress."""


class ReadSlots:
    """A limit of concurrent adapter reads: `with` waits for room before each read, and raises RequestError if
    too many reads hang.

    A read that takes longer than READ_S no longer counts, so that a hanging disk blocks only its own
    adapters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._began: dict[int, float] = {}
        """Start of each read, by thread id."""
        self._hung: set[int] = set()

    def __enter__(self) -> None:
        with self._changed:
            while not self._has_room():
                self._changed.wait(_LOOK_S)
            self._began[threading.get_ident()] = self._clock()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._began.pop(threading.get_ident(), None)
            self._hung.discard(threading.get_ident())
            self._changed.notify_all()

    def _has_room(self) -> bool:
        late = {thread for thread, began in self._began.items() if self._clock() - began >= READ_S}
        if late - self._hung:
            self._hung |= late
            log.warning(
                "%d LoRA adapters are still being read after %g s; other adapters no longer wait for them",
                len(self._hung),
                READ_S,
            )
        if len(self._hung) >= MAX_HUNG:
            raise RequestError(
                f"{len(self._hung)} adapters are being read from storage that does not answer; no other is"
                " read until one of them ends or the engine is started again",
                param="lora_request",
            )
        return len(self._began) - len(self._hung) < AT_ONCE


class AdapterReading:
    """Reads and drops the adapters of a worker in threads. Operations on one adapter run in order, so that a
    hanging disk blocks only its own adapters. Hanging threads end with the process."""

    def __init__(self, worker: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._last: dict[str, Future[Any]] = {}
        """The last unfinished operation, by name."""
        self._lock = threading.Lock()
        self._read_slots = ReadSlots(clock)

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        def read() -> AdapterFacts:
            with self._read_slots:
                return read_adapter(self._worker, lora)

        return self._enqueue(lora.lora_name, read)

    def drop(self, name: str) -> None:
        self._enqueue(name, lambda: self._worker.drop_adapter(name))

    def close(self) -> None:
        """Wait up to `_LAST_S` seconds for the operations in progress."""
        with self._lock:
            unfinished = list(self._last.values())
        wait(unfinished, _LAST_S)

    def _enqueue(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a new thread, after the previous operation on the adapter `name`; return the future
        of its result."""
        future = Future[T]()
        with self._lock:
            before = self._last.get(name)
            self._last[name] = future

        def begin(_: object = None) -> None:
            args = name, work, future
            threading.Thread(target=self._run, args=args, name="quire-adapters", daemon=True).start()

        begin() if before is None else before.add_done_callback(begin)
        return future

    def _run(self, name: str, work: Callable[[], T], future: Future[T]) -> None:
        try:
            self._enter_device()
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        with self._lock:
            if self._last.get(name) is future:
                del self._last[name]

    def _enter_device(self) -> None:
        if self._worker.device.type == "cuda":
            import torch

            torch.cuda.set_device(self._worker.device.index or 0)  # the current device is per thread
