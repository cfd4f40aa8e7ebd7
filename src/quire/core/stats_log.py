"""The periodic log line of engine statistics."""

import time
from collections import deque
from collections.abc import Callable
from itertools import zip_longest

from quire.data.stats import STAT_LOGGERS, IntervalStats, StepStats
from quire.errors import one_line
from quire.logs import get_logger
from quire.metrics.pages import MetricsPages

log = get_logger(__name__)

WINDOW = 1000
"""Number of the last steps with prefix cache lookups that the logged hit rate covers."""


class StatsTotals:
    """Counts prompt and generated tokens since its creation; cached prompt tokens are not counted."""

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
        """Return the prompt tokens and the generated tokens per second since the creation."""
        age_s = max(self.age_s, 1e-6)
        return self.num_prompt / age_s, self.num_generated / age_s


class StatsLog:
    """Sums up steps and logs a line every `interval_s` seconds; repeated lines of an idle engine go to debug
    level.

    Offline inference has runs, each from the first request to the end of the last. The end of a run is logged
    too, unless the last line is younger than `interval_s`. A server has no runs.
    """

    def __init__(
        self,
        interval_s: float,
        pages: MetricsPages,
        *,
        quiet: bool = False,
        rank: int = 0,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self.pages = pages
        self.quiet = quiet
        self.rank = rank
        self._cache_name = "GPU KV cache" if device == "cuda" else "KV cache"
        self._clock = clock
        self._interval, self._run = StatsTotals(clock), StatsTotals(clock)
        self._logged_at = float("-inf")
        self._num_preempted = 0
        self._lookups: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._drafts = StepStats()
        """Draft statistics since the last line."""
        self._was_idle = False

    def begin_run(self) -> None:
        """Start a run: the first request arrives at an idle engine."""
        self._interval, self._run = StatsTotals(self._clock), StatsTotals(self._clock)

    def end_run(self, now: StepStats) -> None:
        """End a run: record its rates, and log them unless the last line is recent. `now` has the current
        gauges."""
        self.pages.observe_rates(*self._run.rates())
        if self._clock() - self._logged_at >= self.interval_s:
            self._log(self._run, now)

    def add(self, stats: StepStats) -> None:
        self._interval.add(stats)
        self._run.add(stats)
        self._num_preempted += stats.num_preempted
        if stats.num_drafts:
            drafts = self._drafts
            drafts.num_drafts += stats.num_drafts
            drafts.num_draft_tokens += stats.num_draft_tokens
            pairs = zip_longest(drafts.num_accepted_by_position, stats.num_accepted_by_position, fillvalue=0)
            drafts.num_accepted_by_position = [sum(pair) for pair in pairs]
        if stats.prefix_queries:
            self._lookups.append((stats.prefix_hits, stats.prefix_queries))

    def tick(self, now: StepStats) -> None:
        """Log a line if `interval_s` seconds have passed since the last one. `now` has the current gauges,
        such as the number of running requests."""
        tally = self._interval
        if tally.age_s < self.interval_s:
            return
        self.pages.observe_rates(*tally.rates())
        idle = not (tally.num_prompt or tally.num_generated or now.num_running or now.num_waiting)
        self._log(tally, now, again=idle and self._was_idle)
        self._was_idle = idle
        self._interval = StatsTotals(self._clock)

    def _log(self, tally: StatsTotals, now: StepStats, *, again: bool = False) -> None:
        self._logged_at = self._clock()
        if not self.quiet:
            stats = self._interval_stats(*tally.rates(), now)
            (log.debug if again else log.info)("%s", self._line(stats))
            _send(stats)
            if self._drafts.num_drafts:
                log.info("%s", _draft_line(self._drafts, tally.age_s))
        self._drafts = StepStats()

    def _interval_stats(self, prompt: float, generated: float, now: StepStats) -> IntervalStats:
        hits, queries = (sum(pair[i] for pair in self._lookups) for i in (0, 1))
        return IntervalStats(
            engine=self.rank,
            prompt_tokens_per_s=prompt,
            generated_tokens_per_s=generated,
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            kv_usage=now.kv_usage,
            prefix_hit_rate=hits / queries if queries else 0.0,
            num_preemptions=self._num_preempted,
        )

    def _line(self, stats: IntervalStats) -> str:
        items = self.pages.value("mm_cache_queries")
        mm_rate = f", MM cache hit rate: {self.pages.value('mm_cache_hits') / items:.1%}" if items else ""
        return (
            f"Engine {stats.engine:03d}: Avg prompt throughput: {stats.prompt_tokens_per_s:.1f} tokens/s, "
            f"Avg generation throughput: {stats.generated_tokens_per_s:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"{self._cache_name} usage: {stats.kv_usage:.1%}, "
            f"Prefix cache hit rate: {stats.prefix_hit_rate:.1%}, "
            f"Preemptions: {stats.num_preemptions}{mm_rate}"
        )


def _send(stats: IntervalStats) -> None:
    """Call the stat loggers of plugins. A logger that raises is not called again."""
    for name in list(STAT_LOGGERS):
        try:
            STAT_LOGGERS[name](stats)
        except Exception as error:  # code of the operator, which may raise anything
            del STAT_LOGGERS.entries[name]
            log.error("The stat logger %r failed and is left out: %s", name, one_line(error))


def _draft_line(drafts: StepStats, age_s: float) -> str:
    """Return the log line of draft acceptance over `age_s` seconds."""
    num_accepted = sum(drafts.num_accepted_by_position)
    rates = ", ".join(f"{count / drafts.num_drafts:.3f}" for count in drafts.num_accepted_by_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + num_accepted / drafts.num_drafts:.2f}, "
        f"Accepted throughput: {num_accepted / age_s:.2f} tokens/s, "
        f"Drafted throughput: {drafts.num_draft_tokens / age_s:.2f} tokens/s, "
        f"Accepted: {num_accepted} tokens, Drafted: {drafts.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {num_accepted / drafts.num_draft_tokens:.1%}"
    )
