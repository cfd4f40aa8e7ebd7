"""Metrics as plain values, as `LLM.get_metrics` returns them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metric:
    """A metric with one set of label values, as plain numbers. The subclasses have the values."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A metric that counts events or tokens and only rises."""

    value: int


@dataclass
class Gauge(Metric):
    """A metric that is the current value of a quantity."""

    value: float


@dataclass
class Vector(Metric):
    """A counter for each position in a draft (speculative decoding), the first draft token first."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """A metric with the count and the sum of its observations; `buckets` maps each upper bound to the
    number of observations up to it."""

    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)


def read_metric(name: str, kind: str, labels: dict[str, str], samples: list[Any]) -> Metric:
    """Return one series of a Prometheus metric as a plain value; `kind` is its Prometheus type, and `samples`
    are the series' samples of `prometheus_client`."""
    if "position" in samples[0].labels:
        return Vector(name, labels, [int(sample.value) for sample in samples])
    if kind == "counter":
        return Counter(name, labels, int(samples[0].value))
    if kind == "gauge":
        return Gauge(name, labels, samples[0].value)
    values = {sample.name.rpartition("_")[2]: sample.value for sample in samples if "le" not in sample.labels}
    buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
    return Histogram(name, labels, int(values["count"]), values["sum"], buckets)
