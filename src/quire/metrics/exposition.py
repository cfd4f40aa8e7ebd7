"""Prometheus' text format of the metrics of one model or of several models."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def exposition(collector: Collector, *, is_only_process: bool) -> str:
    """Return the metrics of a collector in Prometheus' text format. If `is_only_process`, the client
    library's metrics of the Python process are added."""
    registry = CollectorRegistry()
    registry.register(collector)
    if is_only_process:
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
    return generate_latest(registry).decode()


class MergedMetrics:
    """Collector of the metrics of several models: each metric occurs once, with the series of all models."""

    def __init__(self, by_model: Mapping[str, Iterable[Metric]], of_server: Iterable[Metric]) -> None:
        """Initialize with the metrics of the engine cores by model name, and the metrics that all models
        share. Every series of a core gets the label `model_name`."""
        self._by_model = by_model
        self._of_server = of_server

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics (the collector interface of `prometheus_client`)."""
        merged: dict[str, Metric] = {}
        for name, families in self._by_model.items():
            for family in families:
                for place, sample in enumerate(family.samples):
                    family.samples[place] = sample._replace(labels={"model_name": name, **sample.labels})
                if (first := merged.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        yield from merged.values()
        yield from self._of_server
