"""Adapters that a worker reads beside its steps."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from quire.data.lora import AdapterFacts, LoRARequest
from quire.executor.calls import read_adapter

T = TypeVar("T")

_AT_ONCE = 4
"""Adapters that are read."""
_LAST_S = 5.0


class AdapterReading:
    """A worker's adapters, read and dropped: what is told of one name happens in order. One whose disk never
    answers holds up those of its name, four of them all; threads that wait for one end with the process."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._last: dict[str, Future[Any]] = {}
        """By name, what was told last and is not over."""
        self._telling = threading.Lock()
        self._room = threading.Semaphore(_AT_ONCE)

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        return self._behind(lora.lora_name, lambda: read_adapter(self._worker, lora))

    def drop(self, name: str) -> None:
        self._behind(name, lambda: self._worker.drop_adapter(name))

    def close(self) -> None:
        """What is being read comes to its end, if it can."""
        with self._telling:
            left = list(self._last.values())
        wait(left, _LAST_S)

    def _behind(self, name: str, work: Callable[[], T]) -> Future[T]:
        future = Future[T]()
        with self._telling:
            before = self._last.get(name)
            self._last[name] = future
        given = name, work, future, before
        threading.Thread(target=self._do, args=given, name="quire-adapters", daemon=True).start()
        return future

    def _do(self, name: str, work: Callable[[], T], future: Future[T], before: Future[Any] | None) -> None:
        if before is not None:
            wait([before])
        with self._room:
            try:
                self._enter_device()
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        with self._telling:
            if self._last.get(name) is future:
                del self._last[name]

    def _enter_device(self) -> None:
        if self._worker.device.type == "cuda":
            import torch

            torch.cuda.set_device(self._worker.device.index or 0)  # each thread has its own
