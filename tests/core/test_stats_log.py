"""Tests of the statistics log line and its interval."""

import re

import pytest

from quire.core import stats_log
from quire.core.stats_log import StatsLog
from quire.data.stats import STAT_LOGGERS, IntervalStats, StepStats
from quire.metrics.pages import MetricsLayout, MetricsPages

INTERVAL_S = 10.0


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    output: list[str] = []
    monkeypatch.setattr(stats_log.log, "info", lambda text, *values: output.append(text % values))
    return output


def make_log(clock: Clock, quiet: bool = False, device: str = "cpu") -> StatsLog:
    return StatsLog(INTERVAL_S, MetricsPages(MetricsLayout(64)), quiet=quiet, device=device, clock=clock)


def rates(log: StatsLog) -> tuple[float, float]:
    return (
        log.pages.value("avg_prompt_throughput_toks_per_s"),
        log.pages.value("avg_generation_throughput_toks_per_s"),
    )


def preemptions(line: str) -> int:
    (actual,) = re.findall(r"Preemptions: (\d+)", line)
    return int(actual)


@pytest.mark.parametrize(
    ("device", "words"), [("cpu", ", KV cache usage: "), ("cuda", ", GPU KV cache usage: ")]
)
def test_line_names_a_gpu_on_a_gpu_only(clock: Clock, lines: list[str], device: str, words: str) -> None:
    log = make_log(clock, device=device)
    clock.now += INTERVAL_S
    log.tick(StepStats())
    assert words in lines[0]


def test_preemptions_are_counted_from_the_start(clock: Clock, lines: list[str]) -> None:
    """Check that the count does not restart with each line."""
    log = make_log(clock)
    for num_preempted in (2, 0, 3):
        clock.now += INTERVAL_S
        log.add(StepStats(num_sampled_tokens=5, num_preempted=num_preempted))
        log.tick(StepStats())
    assert [preemptions(line) for line in lines] == [2, 2, 5]


def test_rates_are_of_the_interval_and_idle_is_logged_once(clock: Clock, lines: list[str]) -> None:
    log = make_log(clock)
    log.add(StepStats(num_prompt_tokens=70, num_cached_tokens=20, num_sampled_tokens=40))
    log.tick(StepStats())
    assert lines == []
    for expected in ((5.0, 4.0), (0.0, 0.0), (0.0, 0.0)):
        clock.now += INTERVAL_S
        log.tick(StepStats())
        assert rates(log) == expected
    assert len(lines) == 2


def test_run_ends_with_its_own_rates_and_a_line(clock: Clock, lines: list[str]) -> None:
    """Check that a run shorter than the interval has rates of the whole run, not 0 or those of its last
    seconds.
    """
    log = make_log(clock)
    clock.now += 500.0
    log.begin_run()
    log.add(StepStats(num_prompt_tokens=120))
    clock.now += INTERVAL_S
    log.tick(StepStats(num_running=1))
    log.add(StepStats(num_sampled_tokens=60))
    clock.now += 2.0
    log.end_run(StepStats())
    assert rates(log) == (10.0, 5.0)
    assert len(lines) == 1, "one line was logged two seconds before"
    clock.now += INTERVAL_S
    log.begin_run()
    log.add(StepStats(num_prompt_tokens=8, num_sampled_tokens=2))
    clock.now += 2.0
    log.end_run(StepStats())
    assert rates(log) == (4.0, 1.0) and len(lines) == 2
    assert "Avg prompt throughput: 4.0 tokens/s" in lines[-1]


def test_disabled_log_still_keeps_the_rates(clock: Clock, lines: list[str]) -> None:
    log = make_log(clock, quiet=True)
    log.add(StepStats(num_sampled_tokens=40))
    clock.now += INTERVAL_S
    log.tick(StepStats())
    assert rates(log) == (0.0, 4.0) and lines == []


@pytest.fixture
def _no_stat_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STAT_LOGGERS, "entries", {})


@pytest.mark.usefixtures("_no_stat_loggers", "lines")
def test_stat_logger_gets_the_values_of_the_line(clock: Clock) -> None:
    calls: list[IntervalStats] = []
    STAT_LOGGERS.register("mine", calls.append)
    log, silent = make_log(clock), make_log(clock, quiet=True)
    log.add(StepStats(num_prompt_tokens=70, num_cached_tokens=20, num_sampled_tokens=40, num_preempted=2))
    log.add(StepStats(prefix_queries=8, prefix_hits=2))
    clock.now += INTERVAL_S
    for stats in (log, silent):
        stats.tick(StepStats(num_running=3, num_waiting=1, kv_usage=0.5))
    assert calls == [
        IntervalStats(
            engine=0,
            prompt_tokens_per_s=5.0,
            generated_tokens_per_s=4.0,
            num_running=3,
            num_waiting=1,
            kv_usage=0.5,
            prefix_hit_rate=0.25,
            num_preemptions=2,
        )
    ]


@pytest.mark.usefixtures("_no_stat_loggers", "lines")
def test_failing_stat_logger_is_named_and_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a plugin whose error ends the engine core, or fills the log."""
    errors: list[str] = []
    calls: list[IntervalStats] = []
    monkeypatch.setattr(stats_log.log, "error", lambda text, *values: errors.append(text % values))
    STAT_LOGGERS.register("broken", lambda stats: 1 / 0)
    STAT_LOGGERS.register("missing", "nothing_of_this_name:write")
    STAT_LOGGERS.register("mine", calls.append)
    log = make_log(clock)
    for _ in range(2):
        clock.now += INTERVAL_S
        log.tick(StepStats())
    assert len(calls) == 2 and len(errors) == 2
    assert errors[0] == "The stat logger 'broken' failed and is left out: ZeroDivisionError: division by zero"
    assert "'missing'" in errors[1] and "nothing_of_this_name" in errors[1]
