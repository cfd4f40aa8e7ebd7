"""Prometheus metrics with vLLM's names, updated with the stats of each step."""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PromMetric

from quire.data.stats import FrontStats, StepStats
from quire.metrics.api_keys import KeyPages
from quire.metrics.exposition import exposition
from quire.metrics.http_families import add_buckets, families
from quire.metrics.pages import MetricsPages
from quire.metrics.reader import Metric, read_metric
from quire.metrics.tables import (
    ACCEPTED,
    COUNTERS,
    DRAFT_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    LABELLED_GAUGES,
    LENGTHS,
    START_GAUGES,
)


class EngineMetrics:
    """Exports the counters, gauges and histograms of `MetricsPages` as Prometheus metrics."""

    def __init__(
        self,
        pages: MetricsPages,
        *,
        model_name: str,
        cache_info: dict[str, Any],
        first_engine: int = 0,
        keys: KeyPages | None = None,
        max_loras: int | None = None,
    ) -> None:
        """Create the exporter. `cache_info` has the cache settings by name, `first_engine` is the
        data-parallel rank of the first engine, and `max_loras` is None without LoRA."""
        self.pages = pages
        self._keys = keys
        self.model_name = model_name
        self._names = ["model_name", "engine"]
        self._engines = [
            (place, [model_name, str(first_engine + place)]) for place in range(pages.num_engines)
        ]
        """Index of each engine in a page, and its label values: model name and data-parallel rank."""
        self.cache_info = [cache_info | {"engine": labels[1]} for _, labels in self._engines]
        self._is_only_process = len(pages.pages) <= 2
        """Whether this is the only API server process. Process metrics of one of several processes would be
        misleading."""

        self._max_loras = max_loras
        self._adapters: dict[int, tuple[list[str], list[str]]] = {}
        """Names of running and of waiting LoRA adapters, by index of the engine."""
        self._adapters_at = 0.0
        self.weight_versions: dict[int, str] = {}
        """Version of the weights, as the trainer named it, by index of the engine."""

    def note_stats(self, engine: int, stats: StepStats, page: bytes | None) -> None:
        """Take the statistics of an engine core, and its `page` of metrics if it is on another machine. None:
        the engine is a fleet without a page, and the gauges are set from `stats`."""
        self.note_adapters(engine, stats.running_adapters, stats.waiting_adapters)
        self.weight_versions[engine] = stats.weight_version
        if page:
            self.pages.take_page(engine, page)
        elif page is None:
            self.pages.of_engine(engine).observe(stats, FrontStats())

    def note_adapters(self, engine: int, running: list[str], waiting: list[str]) -> None:
        if self._max_loras is not None:
            self._adapters[engine] = running, waiting
            self._adapters_at = time.time()

    def _lora_info(self) -> PromMetric:
        """Return the metric `vllm:lora_requests_info`: one series with the names of the LoRA adapters of all
        engines as labels, as routers expect it."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Unix time of the latest change of the adapters of running and waiting requests.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        if self._adapters:
            running, waiting = (
                ",".join(sorted({name for names in engines for name in names}))
                for engines in zip(*self._adapters.values(), strict=True)
            )
            family.add_metric([str(self._max_loras), waiting, running], self._adapters_at)
        return family

    def _weight_versions(self) -> PromMetric:
        """Return the metric `vllm:weight_version_info`: a series per engine, with its version as a label."""
        text = "Version of the weights, as the trainer named it."
        family = GaugeMetricFamily("vllm:weight_version_info", text, labels=[*self._names, "weight_version"])
        for engine, labels in self._engines:
            if engine in self.weight_versions:
                family.add_metric([*labels, self.weight_versions[engine]], 1)
        return family

    def collect(self) -> Iterator[PromMetric]:
        """Yield all metrics (the collector interface of `prometheus_client`)."""
        yield from self.of_engines()
        yield from self.of_server()

    def of_server(self) -> Iterator[PromMetric]:
        """Yield the metrics of HTTP requests and of API keys."""
        yield from families(self.pages.pages.sum(axis=(0, 1)), self.pages.layout.places)
        yield from () if self._keys is None else self._keys.families()

    def of_engines(self) -> Iterator[PromMetric]:
        """Yield the metrics of the engine cores."""
        for name, text in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text)
        for name, text in START_GAUGES.items():
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
            for engine, labels in self._engines:
                if value := self.pages.value(name, engine):
                    family.add_metric(labels, value)
            yield family
        for name, text in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text)
        for name, (text, label, values) in LABELLED.items():
            kind = GaugeMetricFamily if name in LABELLED_GAUGES else CounterMetricFamily
            yield self._family(kind, name, text, label, values)
        for name, text in ({name: text for name, (text, _) in HISTOGRAMS.items()} | LENGTHS).items():
            yield self._histogram(name, text)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's settings.", labels=list(self.cache_info[0])
        )
        for entry in self.cache_info:
            info.add_metric([str(value) for value in entry.values()], 1)
        yield info
        yield self._weight_versions()
        if self._max_loras is not None:
            yield self._lora_info()
        if max_drafts := self.pages.layout.max_drafts:
            for name, text in DRAFT_COUNTERS.items():
                yield self._family(CounterMetricFamily, name, text)
            text, places = "Accepted tokens by their position in the draft.", map(str, range(max_drafts))
            yield self._family(CounterMetricFamily, ACCEPTED, text, "position", tuple(places))

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        label: str = "",
        values: tuple[str, ...] = (),
    ) -> PromMetric:
        """Return the metric `vllm:NAME` with a series per engine or, with `label`, a series per engine and
        label value in `values`."""
        family = kind(f"vllm:{name}", text, labels=[*self._names, label] if label else self._names)
        for engine, labels in self._engines:
            if not label:
                family.add_metric(labels, self.pages.value(name, engine))
            for value in values:
                family.add_metric([*labels, value], self.pages.value(f"{name}:{value}", engine))
        return family

    def _histogram(self, name: str, text: str) -> PromMetric:
        place, edges = self.pages.layout.places[name], self.pages.layout.edges[name]
        columns = self.pages.pages[:, :, place : place + len(edges) + 2].sum(axis=0)
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=self._names)
        for engine, labels in self._engines:
            add_buckets(family, labels, columns[engine], edges.tolist())
        return family

    def text(self) -> str:
        """Return the metrics in Prometheus' text format, with process metrics if `_is_only_process`."""
        return exposition(self, is_only_process=self._is_only_process)

    def snapshot(self) -> list["Metric"]:
        """Return each series of each metric as a plain value, for `LLM.get_metrics()`."""
        metrics: list[Metric] = []
        for family in self.collect():
            by_labels: dict[tuple[tuple[str, str], ...], list[Any]] = {}
            for sample in family.samples:
                key = tuple(item for item in sample.labels.items() if item[0] not in ("le", "position"))
                by_labels.setdefault(key, []).append(sample)
            metrics += [
                read_metric(family.name, family.type, dict(key), samples)
                for key, samples in by_labels.items()
            ]
        return metrics
