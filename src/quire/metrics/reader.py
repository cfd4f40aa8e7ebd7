"""Metrics as plain values, as `LLM.get_metrics` returns them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metric:
    """One series of a metric as a plain value."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only rises."""

    value: int


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Vector(Metric):
    """Counts by draft position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Count and sum of observations, and the cumulative count up to each bound."""

    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)


def read_metric(name: str, kind: str, labels: dict[str, str], samples: list[Any]) -> Metric:
    """Return one series of a Prometheus metric as a plain value."""
    if "position" in samples[0].labels:
        return Vector(name, labels, [int(sample.value) for sample in samples])
    if kind == "counter":
        return Counter(name, labels, int(samples[0].value))
    if kind == "gauge":
        return Gauge(name, labels, samples[0].value)
    values = {sample.name.rpartition("_")[2]: sample.value for sample in samples if "le" not in sample.labels}
    buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
    return Histogram(name, labels, int(values["count"]), values["sum"], buckets)
