"""HTTP metrics with the names of prometheus-fastapi-instrumentator, which dashboards use."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.core import Metric as PromMetric
from prometheus_client.utils import floatToGoString

from quire.metrics.http import COUNTED, EDGES, HANDLERS, STATUSES


def families(total: NDArray[np.float64], places: dict[str, int]) -> Iterator[PromMetric]:
    """Yield the HTTP metrics from `total`, the sum of the metrics pages of all processes; `places` has the
    index in it of each series, by name."""
    requests = CounterMetricFamily(
        "http_requests", "Requests by method, status and handler.", labels=["handler", "method", "status"]
    )
    coarse = HistogramMetricFamily(
        "http_request_duration_seconds", "Time to answer a request.", labels=["handler", "method"]
    )
    for handler, method in COUNTED:
        for status in STATUSES:
            if count := total[places[f"http_requests {method} {handler} {status}"]]:
                requests.add_metric([handler, method, status], count)
        _add(coarse, [handler, method], total, places, f"http_request_duration_seconds {method} {handler}")
    fine = HistogramMetricFamily(
        "http_request_duration_highr_seconds", "Time to answer a request, in many buckets."
    )
    _add(fine, [], total, places, "http_request_duration_highr_seconds")
    yield from (family for family in (requests, coarse, fine) if family.samples)
    for side in ("request", "response"):
        sizes = SummaryMetricFamily(
            f"http_{side}_size_bytes", f"Content length of {side}s.", labels=["handler"]
        )
        for handler in HANDLERS:
            place = places[f"http_{side}_size_bytes {handler}"]
            if count := total[place]:
                sizes.add_metric([handler], count, total[place + 1])
        if sizes.samples:
            yield sizes


def _add(
    family: HistogramMetricFamily,
    labels: list[str],
    total: NDArray[np.float64],
    places: dict[str, int],
    name: str,
) -> None:
    place, edges = places[name], EDGES[name]
    columns = total[place : place + len(edges) + 2]
    if columns[:-1].any():
        add_buckets(family, labels, columns, edges)


def add_buckets(
    family: HistogramMetricFamily, labels: list[str], columns: NDArray[np.float64], edges: list[float]
) -> None:
    """Add a series to a histogram. `columns` has a count for each bucket (not cumulative; the last is
    above all `edges`), then the sum of the values."""
    bounds = [*(floatToGoString(edge) for edge in edges), "+Inf"]
    counts = np.cumsum(columns[:-1]).tolist()
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), float(columns[-1]))
