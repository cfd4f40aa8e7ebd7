"""Computes the printed and saved results from records of requests, under vLLM's names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.bench.traffic import Record, token_times

WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
PERCENTILES = (10, 25, 50, 75, 90, 99)
"""Percentiles that `bench latency` and `bench startup` report, as in vLLM."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def summarise(
    records: Sequence[Record],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Return the results of a run of `duration` seconds by vLLM's names. `goodput` has the limit of each
    metric, in milliseconds, that a good request keeps."""
    done = [record for record in records if not record.error]
    num_in, num_out = sum(record.prompt_len for record in done), sum(record.output_len for record in done)
    num_good = sum(_is_good(record, goodput) for record in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration,
        "request_goodput": num_good / duration if goodput else None,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "max_output_tokens_per_s": peak_rate(done, duration),
        "max_concurrent_requests": peak_concurrency(done),
    }
    for name in metrics:
        result |= _statistics(name, _milliseconds(done)[name], percentiles)
    return result


def detailed(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return lists with one entry per request, by their names in the result file, for `--save-detailed`."""
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [0.0 if record.error else record.ttft for record in records],
        "itls": [record.itls for record in records],
        "generated_texts": ["".join(record.pieces) for record in records],
        "errors": [record.error for record in records],
        "start_times": [record.start for record in records],
    }


def peak_rate(records: Sequence[Record], duration: float) -> float:
    """Return the tokens per second in the busiest second. If the run does not last whole seconds, windows are
    slightly shorter, so that the peak is never below the mean."""
    window = duration / math.ceil(duration)
    arrivals = sorted(token_times(records))
    most = within = 0.0
    first = 0
    for at, num_tokens in arrivals:
        within += num_tokens
        while arrivals[first][0] < at - window:
            within -= arrivals[first][1]
            first += 1
        most = max(most, within)
    return most / window


def peak_concurrency(records: Sequence[Record]) -> int:
    """Return the highest number of concurrent requests."""
    changes = sorted([(record.start, 1) for record in records] + [(record.end, -1) for record in records])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0


def lines(result: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """Return the lines that are printed after a run."""

    def row(title: str, key: str, form: str = "<10.2f") -> list[str]:
        return [f"{title:<40} {result[key]:{form}}"] if result.get(key) is not None else []

    limited = result.get("request_rate") not in (None, "inf")
    shown = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        *row("Successful requests:", "completed", "<10"),
        *row("Failed requests:", "failed", "<10"),
        *row("Maximum request concurrency:", "max_concurrency", "<10"),
        *(row("Request rate configured (RPS):", "request_rate") if limited else []),
        *row("Benchmark duration (s):", "duration"),
        *row("Total input tokens:", "total_input_tokens", "<10"),
        *row("Total generated tokens:", "total_output_tokens", "<10"),
        *row("Request throughput (req/s):", "request_throughput"),
        *row("Request goodput (req/s):", "request_goodput"),
        *row("Output token throughput (tok/s):", "output_throughput"),
        *row("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        *row("Peak concurrent requests:", "max_concurrent_requests", "<10.2f"),
        *row("Total token throughput (tok/s):", "total_token_throughput"),
    ]
    for name in metrics:
        short = name.upper()
        shown.append(f"{TITLES[name]:-^{WIDTH}}")
        shown += row(f"Mean {short} (ms):", f"mean_{name}_ms") + row(
            f"Median {short} (ms):", f"median_{name}_ms"
        )
        for percent in percentiles:
            shown += row(f"P{percent:g} {short} (ms):", f"p{percent:g}_{name}_ms")
    shown += row("Prefix cache hit rate (%):", "prefix_cache_hit_rate")
    for reason, count in result.get("prefix_cache_misses", {}).items():
        shown.append(f"{f'  Requests with a miss, {reason}:':<40} {count:<10}")
    shown += _draft_lines(result)
    return [*shown, "=" * WIDTH]


def _draft_lines(result: Mapping[str, Any]) -> list[str]:
    if "spec_decode_num_drafts" not in result:
        return []
    rates = result["spec_decode_per_position_acceptance_rates"]
    return [
        f"{'Speculative Decoding':-^{WIDTH}}",
        f"{'Acceptance rate (%):':<40} {result['spec_decode_acceptance_rate']:<10.2f}",
        f"{'Acceptance length:':<40} {result['spec_decode_acceptance_length']:<10.2f}",
        f"{'Drafts:':<40} {result['spec_decode_num_drafts']:<10}",
        f"{'Draft tokens:':<40} {result['spec_decode_draft_tokens']:<10}",
        f"{'Accepted tokens:':<40} {result['spec_decode_accepted_tokens']:<10}",
        *(f"{f'  Position {i}:':<40} {rate * 100:<10.2f}" for i, rate in enumerate(rates)),
    ]


def _is_good(record: Record, goodput: Mapping[str, float]) -> bool:
    taken = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(taken[name] * 1e3 <= limit for name, limit in goodput.items())


def _milliseconds(records: Sequence[Record]) -> dict[str, list[float]]:
    return {
        "ttft": [record.ttft * 1e3 for record in records],
        "tpot": [record.tpot * 1e3 for record in records if record.tpot is not None],
        "itl": [gap * 1e3 for record in records for gap in record.itls],
        "e2el": [record.latency * 1e3 for record in records],
    }


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    array = np.array(values or [0.0])
    return {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
        **{f"p{percent:g}_{name}_ms": float(np.percentile(array, percent)) for percent in percentiles},
    }
