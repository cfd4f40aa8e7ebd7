"""The periodic line about the engine, and the rates behind it."""

import time
from collections import deque
from collections.abc import Callable
from itertools import zip_longest

from quire.data.stats import StepStats
from quire.logs import get_logger
from quire.metrics import MetricsPages

log = get_logger(__name__)

WINDOW = 1000
"""Admissions that the prefix hit rate is taken over."""


class StatsTotals:
    """Tokens since it was made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.num_prompt = self.num_generated = 0

    @property
    def age_s(self) -> float:
        return self._clock() - self._began

    def add(self, stats: StepStats) -> None:
        self.num_prompt += stats.num_prompt_tokens - stats.num_cached_tokens
        self.num_generated += stats.num_sampled_tokens

    def rates(self) -> tuple[float, float]:
        """Prompt and generated tokens per second."""
        age_s = max(self.age_s, 1e-6)
        return self.num_prompt / age_s, self.num_generated / age_s


class StatsLog:
    """Adds up steps, and every `interval_s` seconds says what they came to. Says nothing twice while idle.

    A server's time never ends. Offline it comes in runs, from the first request to the end of the last, and
    the end of one is worth a line, too, unless the last is not `interval_s` old.
    """

    def __init__(
        self,
        interval_s: float,
        pages: MetricsPages,
        *,
        quiet: bool = False,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self.pages = pages
        self.quiet = quiet
        self.rank = rank
        self._clock = clock
        self._interval, self._run = StatsTotals(clock), StatsTotals(clock)
        self._said_at = float("-inf")
        self._num_preempted = 0
        self._lookups: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._drafts = StepStats()
        """Since the last line."""
        self._was_idle = False

    def begin_run(self) -> None:
        """The first request comes to an engine at rest."""
        self._interval, self._run = StatsTotals(self._clock), StatsTotals(self._clock)

    def end_run(self, now: StepStats) -> None:
        """The last request has ended: the rates are those of the whole run."""
        self.pages.observe_rates(*self._run.rates())
        if self._clock() - self._said_at >= self.interval_s:
            self._say(self._run, now)

    def add(self, stats: StepStats) -> None:
        self._interval.add(stats)
        self._run.add(stats)
        self._num_preempted += stats.num_preempted
        if stats.num_drafts:
            drafts = self._drafts
            drafts.num_drafts += stats.num_drafts
            drafts.num_draft_tokens += stats.num_draft_tokens
            each = zip_longest(drafts.held_by_place, stats.held_by_place, fillvalue=0)
            drafts.held_by_place = [sum(pair) for pair in each]
        if stats.prefix_queries:
            self._lookups.append((stats.prefix_hits, stats.prefix_queries))

    def tick(self, now: StepStats) -> None:
        """`now` has the gauges of this moment."""
        tally = self._interval
        if tally.age_s < self.interval_s:
            return
        self.pages.observe_rates(*tally.rates())
        idle = not (tally.num_prompt or tally.num_generated or now.num_running or now.num_waiting)
        self._say(tally, now, again=idle and self._was_idle)
        self._was_idle = idle
        self._interval = StatsTotals(self._clock)

    def _say(self, tally: StatsTotals, now: StepStats, *, again: bool = False) -> None:
        self._said_at = self._clock()
        if not self.quiet:
            (log.debug if again else log.info)("%s", self._line(*tally.rates(), now))
            if self._drafts.num_drafts:
                log.info("%s", _draft_line(self._drafts, tally.age_s))
        self._drafts = StepStats()

    def _line(self, prompt: float, generated: float, now: StepStats) -> str:
        hits, queries = (sum(pair[i] for pair in self._lookups) for i in (0, 1))
        items = self.pages.value("mm_cache_queries")
        found = f", MM cache hit rate: {self.pages.value('mm_cache_hits') / items:.1%}" if items else ""
        return (
            f"Engine {self.rank:03d}: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generated:.1f} tokens/s, Running: {now.num_running} reqs, "
            f"Waiting: {now.num_waiting} reqs, GPU KV cache usage: {now.kv_usage:.1%}, "
            f"Prefix cache hit rate: {hits / queries if queries else 0.0:.1%}, "
            f"Preemptions: {self._num_preempted}{found}"
        )


def _draft_line(drafts: StepStats, age_s: float) -> str:
    """What became of the drafts of so many seconds."""
    held = sum(drafts.held_by_place)
    rates = ", ".join(f"{count / drafts.num_drafts:.3f}" for count in drafts.held_by_place)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + held / drafts.num_drafts:.2f}, "
        f"Accepted throughput: {held / age_s:.2f} tokens/s, "
        f"Drafted throughput: {drafts.num_draft_tokens / age_s:.2f} tokens/s, "
        f"Accepted: {held} tokens, Drafted: {drafts.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {held / drafts.num_draft_tokens:.1%}"
    )
