"""Metrics of API keys: pages in one shared file, one for each API server process, and one common page.

Each process writes only its own page, so that counting needs no lock. The common page holds the values that
all processes read and write under a lock.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PromMetric

from quire.data.latency_target import LatencyTarget

COLUMNS = ("requests", "prompt_tokens", "generation_tokens", "running")
REASONS = ("concurrency", "tokens")
"""Limits of an API key that a request can be rejected for."""
_ALL = [*COLUMNS, *REASONS]
_PLACE = {name: place for place, name in enumerate(_ALL)}
_TEXTS = {
    "requests": "Requests admitted, by key.",
    "prompt_tokens": "Prompt tokens, by key.",
    "generation_tokens": "Tokens generated, by key.",
}


class KeyPages:
    """Request and token counters of each API key, summed over all API server processes of a server. Without
    a file, they are in memory and there is only one process."""

    def __init__(self, names: Sequence[str], file: Path | None = None, *, process: int = 0) -> None:
        self.names = tuple(names)
        size = (-1, len(self.names), len(_ALL))
        if file is None:
            self._pages = np.zeros((2, *size[1:]))
        else:
            self._pages = np.memmap(file, np.float64, "r+").view(np.ndarray).reshape(size)
        self._file = None if file is None else file.open("rb")
        self._own = self._pages[1 + process]
        self._own[:, _PLACE["running"]] = 0  # left over from a process that died

    @staticmethod
    def create(file: Path, num_keys: int, *, num_api: int) -> None:
        np.zeros((1 + num_api, num_keys, len(_ALL))).tofile(file)

    def add(self, key: int, what: str, count: int = 1) -> None:
        self._own[key, _PLACE[what]] += count

    def total(self, key: int, what: str) -> float:
        return float(self._pages[1:, key, _PLACE[what]].sum())

    @contextmanager
    def agreed(self, key: int) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float64]]"]:
        """Yield the row of a key in the common page, a writable array of counts, under the lock of all API
        server processes. Blocks until the lock is free."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self._pages[0, key]
        finally:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def families(self) -> Iterator[PromMetric]:
        for what, text in _TEXTS.items():
            family = CounterMetricFamily(f"quire:key_{what}", text, labels=["key"])
            for key, name in enumerate(self.names):
                family.add_metric([name], self.total(key, what))
            yield family
        rejected = CounterMetricFamily(
            "quire:key_rejected", "Requests rejected, by key and limit.", labels=["key", "reason"]
        )
        running = GaugeMetricFamily("quire:key_running", "Running requests, by key.", labels=["key"])
        for key, name in enumerate(self.names):
            running.add_metric([name], self.total(key, "running"))
            for reason in REASONS:
                rejected.add_metric([name, reason], self.total(key, reason))
        yield from (rejected, running)


class KeyAccount:
    """An API key in the engine: its tenant, weight and targets for scheduling, and its token counters."""

    def __init__(
        self, number: int, weight: float, pages: KeyPages, target: LatencyTarget | None = None
    ) -> None:
        """Create the account of the key with the index `number`. A `target` of None: the server's targets."""
        self._number = number
        self._pages = pages
        self.tenant = number + 1
        self.weight = weight
        self.target = target

    def add_prompt(self, num_tokens: int) -> None:
        self._pages.add(self._number, "prompt_tokens", num_tokens)

    def add_output(self, num_tokens: int) -> None:
        self._pages.add(self._number, "generation_tokens", num_tokens)
