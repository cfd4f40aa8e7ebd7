"""The periodic line about the engine, and the rates behind it."""

import time
from collections import deque

from quire.data.stats import StepStats
from quire.logs import get_logger
from quire.metrics import MetricsPages

log = get_logger(__name__)

WINDOW = 1000
"""Admissions that the prefix hit rate is taken over."""


class StatsLog:
    """Adds up steps, and every `interval_s` seconds says what they came to. Says nothing twice while idle."""

    def __init__(self, interval_s: float, pages: MetricsPages, *, quiet: bool = False) -> None:
        self.interval_s = interval_s
        self.pages = pages
        self.quiet = quiet
        self._began = time.monotonic()
        self._num_prompt = self._num_generated = self._num_preempted = 0
        self._lookups: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._was_idle = False

    def add(self, stats: StepStats) -> None:
        self._num_prompt += stats.num_prompt_tokens - stats.num_cached_tokens
        self._num_generated += stats.num_sampled_tokens
        self._num_preempted += stats.num_preempted
        if stats.prefix_queries:
            self._lookups.append((stats.prefix_hits, stats.prefix_queries))

    def tick(self, now: StepStats) -> None:
        """`now` has the gauges of this moment."""
        elapsed = time.monotonic() - self._began
        if elapsed < self.interval_s:
            return
        prompt, generated = self._num_prompt / elapsed, self._num_generated / elapsed
        self.pages.observe_rates(prompt, generated)
        idle = not (self._num_prompt or self._num_generated or now.num_running or now.num_waiting)
        if not self.quiet:
            say = log.debug if idle and self._was_idle else log.info
            say("%s", self._line(prompt, generated, now))
        self._was_idle = idle
        self._began = time.monotonic()
        self._num_prompt = self._num_generated = self._num_preempted = 0

    def _line(self, prompt: float, generated: float, now: StepStats) -> str:
        hits, queries = (sum(pair[i] for pair in self._lookups) for i in (0, 1))
        return (
            f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generated:.1f} tokens/s, Running: {now.num_running} reqs, "
            f"Waiting: {now.num_waiting} reqs, GPU KV cache usage: {now.kv_usage:.1%}, "
            f"Prefix cache hit rate: {hits / queries if queries else 0.0:.1%}, "
            f"Preemptions: {self._num_preempted}"
        )
