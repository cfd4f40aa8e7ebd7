"""Prometheus metrics under vLLM's names, fed by the stats of each step."""

import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram

from quire.data.stats import FinishedSequence, FrontStats, StepStats

_FIRST_TOKEN = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
_PER_TOKEN = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
]
_PER_REQUEST = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]
_STEP_TOKENS = [1, *(2**power for power in range(3, 15))]

GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be admitted.",
    "kv_cache_usage_perc": "Share of the KV cache blocks in use, 0 to 1.",
    "gpu_cache_usage_perc": "The same under its older name.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests preempted by recomputation.",
    "prompt_tokens": "Prompt tokens processed, cached ones counted in.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "generation_tokens": "Tokens generated.",
}
HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "iteration_tokens_total": ("Tokens computed in one step.", [float(edge) for edge in _STEP_TOKENS]),
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _PER_TOKEN),
    "time_per_output_token_seconds": ("The same under its older name.", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _PER_REQUEST),
    "request_queue_time_seconds": ("Time spent waiting.", _PER_REQUEST),
    "request_inference_time_seconds": ("From admission to the last token.", _PER_REQUEST),
    "request_prefill_time_seconds": ("From admission to the first token.", _PER_REQUEST),
    "request_decode_time_seconds": ("From the first token to the last.", _PER_REQUEST),
    "request_params_n": ("Sequences asked for.", [1, 2, 5, 10, 20]),
}
LENGTHS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_max_num_generation_tokens": "Most tokens generated for any sequence of a request.",
    "request_params_max_tokens": "The max_tokens of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, cached ones left out.",
}


def length_buckets(longest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`."""
    edges = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return [float(edge) for edge in edges if edge <= longest]


class EngineMetrics:
    """The collectors of one engine. Its registry is its own: two engines in a process do not collide."""

    def __init__(
        self, *, model_name: str, max_model_len: int, cache_info: dict[str, Any], engine: str = "0"
    ) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": engine}
        buckets = length_buckets(max_model_len)

        def bound(kind: Any, name: str, text: str, **options: Any) -> Any:
            return kind(f"vllm:{name}", text, list(labels), registry=self.registry, **options).labels(
                **labels
            )

        self.gauges = {name: bound(PromGauge, name, text) for name, text in GAUGES.items()}
        self.counters = {name: bound(PromCounter, name, text) for name, text in COUNTERS.items()}
        histograms = HISTOGRAMS | {name: (text, buckets) for name, text in LENGTHS.items()}
        self.histograms = {
            name: bound(PromHistogram, name, text, buckets=edges)
            for name, (text, edges) in histograms.items()
        }
        success = PromCounter(
            "vllm:request_success",
            "Requests that ended.",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
        reasons = ("stop", "length", "abort", "error", "repetition")
        self.success = {reason: success.labels(**labels, finished_reason=reason) for reason in reasons}
        info = {key: str(value) for key, value in cache_info.items()} | {"engine": engine}
        PromGauge(
            "vllm:cache_config_info", "The cache's settings.", list(info), registry=self.registry
        ).labels(**info).set(1)

    def observe(self, step: StepStats, front: FrontStats) -> None:
        self.gauges["num_requests_running"].set(step.num_running)
        self.gauges["num_requests_waiting"].set(step.num_waiting)
        self.gauges["kv_cache_usage_perc"].set(step.kv_usage)
        self.gauges["gpu_cache_usage_perc"].set(step.kv_usage)
        self.counters["prefix_cache_queries"].inc(step.prefix_queries)
        self.counters["prefix_cache_hits"].inc(step.prefix_hits)
        self.counters["num_preemptions"].inc(step.num_preempted)
        # Counted when a request is first admitted: what a preempted one computes again is no new prompt.
        self.counters["prompt_tokens"].inc(step.prefix_queries)
        self.counters["prompt_tokens_cached"].inc(step.prefix_hits)
        self.counters["generation_tokens"].inc(step.num_sampled_tokens)
        if step.num_computed_tokens:
            self.histograms["iteration_tokens_total"].observe(step.num_computed_tokens)
        for seconds in front.first_token_s:
            self.histograms["time_to_first_token_seconds"].observe(seconds)
        for seconds in front.between_tokens_s:
            self.histograms["inter_token_latency_seconds"].observe(seconds)
            self.histograms["time_per_output_token_seconds"].observe(seconds)
        for ended in front.finished:
            self._observe_end(ended)

    def _observe_end(self, ended: FinishedSequence) -> None:
        self.success[ended.reason].inc()
        times, seen = ended.times, self.histograms
        seen["request_prompt_tokens"].observe(ended.num_prompt_tokens)
        seen["request_generation_tokens"].observe(ended.num_output_tokens)
        seen["request_max_num_generation_tokens"].observe(ended.num_output_tokens)
        seen["request_prefill_kv_computed_tokens"].observe(ended.num_prompt_tokens - ended.num_cached)
        seen["request_params_n"].observe(ended.params.n)
        if ended.params.max_tokens is not None:
            seen["request_params_max_tokens"].observe(ended.params.max_tokens)
        seen["e2e_request_latency_seconds"].observe(time.time() - ended.arrived_at)
        if not ended.num_output_tokens:
            return
        decode = times.last_token_at - times.first_token_at
        seen["request_queue_time_seconds"].observe(times.scheduled_at - times.queued_at)
        seen["request_prefill_time_seconds"].observe(times.first_token_at - times.scheduled_at)
        seen["request_decode_time_seconds"].observe(decode)
        seen["request_inference_time_seconds"].observe(times.last_token_at - times.scheduled_at)
        if ended.num_output_tokens > 1:
            seen["request_time_per_output_token_seconds"].observe(decode / (ended.num_output_tokens - 1))

    def snapshot(self) -> list["Metric"]:
        """Every metric as a plain value, as `LLM.get_metrics()` returns them."""
        found: list[Metric] = []
        for family in self.registry.collect():
            by_labels: dict[tuple[tuple[str, str], ...], list[Any]] = {}
            for sample in family.samples:
                key = tuple(item for item in sample.labels.items() if item[0] != "le")
                if not sample.name.endswith("_created"):
                    by_labels.setdefault(key, []).append(sample)
            found += [
                _metric(family.name, family.type, dict(key), samples) for key, samples in by_labels.items()
            ]
        return found


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    values: list[int]


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)


def _metric(name: str, kind: str, labels: dict[str, str], samples: list[Any]) -> Metric:
    if kind == "counter":
        return Counter(name, labels, int(samples[0].value))
    if kind == "gauge":
        return Gauge(name, labels, samples[0].value)
    values = {sample.name.rpartition("_")[2]: sample.value for sample in samples if "le" not in sample.labels}
    buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
    return Histogram(name, labels, int(values["count"]), values["sum"], buckets)
