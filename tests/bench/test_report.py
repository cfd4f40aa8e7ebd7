"""Tests of the numbers of a run against values computed by hand."""

from typing import Any

import pytest

from quire.bench.report import detailed, lines, peak_concurrency, peak_rate, summarise
from quire.bench.traffic import Record

# Start, arrivals and end in seconds. TTFT 100 and 300 ms, TPOT 100 and 50 ms, E2EL 300 and 400 ms.
FIRST = Record(10, start=0.0, arrivals=[0.1, 0.2, 0.3], end=0.31)
SECOND = Record(20, start=1.0, arrivals=[1.3, 1.4], num_tokens=3, end=1.5)
FAILED = Record(30, start=0.5, arrivals=[0.6], end=0.7, error="HTTP 500: no")
ALL = ("ttft", "tpot", "itl", "e2el")


def summary(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"metrics": ALL, "percentiles": (50.0, 99.0), "goodput": {}}
    return summarise([FIRST, SECOND, FAILED], 2.0, **(settings | changes))


def test_counts_and_rates_exclude_failures() -> None:
    actual = summary()
    assert (actual["completed"], actual["failed"]) == (2, 1)
    assert (actual["total_input_tokens"], actual["total_output_tokens"]) == (30, 6)
    assert actual["request_throughput"] == 1.0 and actual["output_throughput"] == 3.0
    assert actual["total_token_throughput"] == 18.0 and actual["request_goodput"] is None


def test_latencies() -> None:
    actual = summary()
    expected = {
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 100.0,
        "p50_ttft_ms": 200.0,
        "p99_ttft_ms": 100 + 0.99 * 200,
        "mean_tpot_ms": 75.0,
        "mean_itl_ms": 100.0,
        "mean_e2el_ms": 350.0,
        "p99_e2el_ms": 300 + 0.99 * 100,
    }
    assert {name: actual[name] for name in expected} == pytest.approx(expected)


def test_only_requested_metrics_are_shown() -> None:
    actual = summary(metrics=("itl",), percentiles=(99.9,))
    assert {name for name in actual if name.endswith("_ms")} == {
        "mean_itl_ms",
        "median_itl_ms",
        "std_itl_ms",
        "p99.9_itl_ms",
    }


@pytest.mark.parametrize(
    ("goodput", "per_second"),
    [
        ({"ttft": 100.1}, 0.5),
        ({"ttft": 500.0}, 1.0),
        ({"tpot": 60.0}, 0.5),
        ({"ttft": 150.0, "tpot": 60.0}, 0.0),
        ({"e2el": 350.0}, 0.5),
    ],
)
def test_goodput_needs_every_limit_met(goodput: dict[str, float], per_second: float) -> None:
    assert summary(goodput=goodput)["request_goodput"] == per_second


def test_only_failures_do_not_crash() -> None:
    actual = summarise([FAILED], 1.0, metrics=ALL, percentiles=(99.0,), goodput={"ttft": 1.0})
    assert actual["completed"] == 0 and actual["mean_ttft_ms"] == 0.0 and actual["request_goodput"] == 0.0
    assert actual["max_output_tokens_per_s"] == 0.0 and actual["max_concurrent_requests"] == 0


def test_peaks() -> None:
    assert peak_rate([FIRST, SECOND], 2.0) == 3.0
    burst = Record(1, start=0.0, arrivals=[2.0, 2.5, 2.9, 3.1], end=4.0)
    assert peak_rate([FIRST, burst], 4.0) == 3.0 and peak_rate([burst, burst], 4.0) == 6.0
    assert peak_concurrency([FIRST, SECOND]) == 1
    assert peak_concurrency([FIRST, FAILED, Record(1, start=0.2, end=0.6)]) == 2
    assert peak_concurrency([Record(1, start=0.0, end=1.0), Record(1, start=1.0, end=2.0)]) == 1


@pytest.mark.parametrize("duration", [0.4, 1.0, 1.66, 2.5])
@pytest.mark.parametrize("num_chunks", [1, 3, 100])
def test_peak_is_never_below_the_mean(duration: float, num_chunks: int) -> None:
    """Check that tokens instead of chunks are counted, and that a run may last fractions of seconds."""
    records = []
    for number in range(20):
        start = duration * number / 20
        gap = (duration - start) / num_chunks
        arrivals = [start + gap * (i + 1) for i in range(num_chunks)]
        records.append(Record(1, start=start, end=duration, arrivals=arrivals, num_tokens=100))
    actual = summarise(records, duration, metrics=(), percentiles=(), goodput={})
    assert actual["max_output_tokens_per_s"] >= actual["output_throughput"] * 0.9999


def test_summary_matches_vllms_format() -> None:
    result = summary(goodput={"ttft": 500.0}) | {"max_concurrency": 4, "request_rate": 2.0}
    assert lines(result, metrics=("ttft", "e2el"), percentiles=(99.0,)) == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             4         ",
        "Request rate configured (RPS):           2.00      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      30        ",
        "Total generated tokens:                  6         ",
        "Request throughput (req/s):              1.00      ",
        "Request goodput (req/s):                 1.00      ",
        "Output token throughput (tok/s):         3.00      ",
        "Peak output token throughput (tok/s):    3.00      ",
        "Peak concurrent requests:                1.00      ",
        "Total token throughput (tok/s):          18.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00    ",
        "Median TTFT (ms):                        200.00    ",
        "P99 TTFT (ms):                           298.00    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          350.00    ",
        "Median E2EL (ms):                        350.00    ",
        "P99 E2EL (ms):                           399.00    ",
        "==================================================",
    ]


def test_unset_values_are_not_shown() -> None:
    result = summary() | {"max_concurrency": None, "request_rate": "inf"}
    shown = "\n".join(lines(result, metrics=("tpot", "itl"), percentiles=(99.0,)))
    assert "concurrency:" not in shown and "configured" not in shown and "goodput" not in shown
    assert "-----Time per Output Token (excl. 1st token)------" in shown
    assert "---------------Inter-token Latency----------------" in shown and "Speculative" not in shown


def test_drafts_are_shown_if_there_were_some() -> None:
    drafted = {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 1.5,
        "spec_decode_num_drafts": 2,
        "spec_decode_draft_tokens": 4,
        "spec_decode_accepted_tokens": 2,
        "spec_decode_per_position_acceptance_rates": [0.5],
    }
    shown = lines(summary() | drafted, metrics=(), percentiles=())
    assert "---------------Speculative Decoding---------------" in shown
    assert "Acceptance rate (%):                     50.00     " in shown


def test_details_have_an_entry_per_request() -> None:
    actual = detailed([FIRST, FAILED])
    assert actual["errors"] == ["", "HTTP 500: no"] and actual["output_lens"] == [3, 1]
    assert actual["itls"][0] == pytest.approx([0.1, 0.1]) and actual["ttfts"] == [pytest.approx(0.1), 0.0]
    assert {len(values) for values in actual.values()} == {2}
