"""Pages of one shared file in which all processes of a server count."""

import copy
import time
from bisect import bisect_left
from pathlib import Path

import numpy as np

from quire.config.engine import EngineConfig
from quire.data.stats import FinishedSequence, FrontStats, StepStats
from quire.metrics import kv_offload
from quire.metrics.http import EDGES, SERIES, Exchange
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


def length_buckets(longest: int) -> list[float]:
    """Return the bucket bounds 1, 2, 5, 10, 20, 50, ... up to `longest` tokens."""
    edges = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return [float(edge) for edge in edges if edge <= longest]


class MetricsLayout:
    """The index of each series in a page (an array of numbers). All processes of an engine use the same
    layout."""

    def __init__(self, max_model_len: int, max_drafts: int = 0) -> None:
        labelled = [f"{name}:{value}" for name, (_, _, values) in LABELLED.items() for value in values]
        self.max_drafts = max_drafts
        if max_drafts:
            labelled += [*DRAFT_COUNTERS, *(f"{ACCEPTED}:{place}" for place in range(max_drafts))]
        names = [*GAUGES, *START_GAUGES, *COUNTERS, *labelled, *SERIES]
        self.places = {name: place for place, name in enumerate(names)}
        edges = {name: edges for name, (_, edges) in HISTOGRAMS.items()} | EDGES
        edges |= dict.fromkeys(LENGTHS, length_buckets(max_model_len))
        self.edges = {name: np.array(bounds, np.float64) for name, bounds in edges.items()}
        size = len(self.places)
        for name, bounds in self.edges.items():
            self.places[name] = size
            size += len(bounds) + 2  # a count per bucket, one above the last bound, and the sum
        self.size = size

    @classmethod
    def of(cls, config: EngineConfig) -> "MetricsLayout":
        speculation = config.speculation
        return cls(
            config.model.max_model_len, 0 if speculation is None else speculation.num_speculative_tokens
        )


class MetricsPages:
    """Metrics of a server as pages (arrays of numbers) of one shared file, by process and engine. Each
    process writes only its own pages, and readers add up all pages. The pages of the engine cores come first,
    together as one process; each API server process follows, with a page per engine.

    A restarted process continues with the pages of its predecessor, so that counters never decrease.
    Without a file, the pages are in memory and there is only one process."""

    def __init__(
        self,
        layout: MetricsLayout,
        file: Path | None = None,
        *,
        process: int = 0,
        engine: int = 0,
        num_engines: int = 1,
    ) -> None:
        self.layout = layout
        if file is None:
            self.pages = np.zeros((1, num_engines, layout.size))
        else:
            # A plain array: indexing a memmap creates another memmap object each time.
            whole = np.memmap(file, np.float64, "r+").view(np.ndarray)
            self.pages = whole.reshape(-1, num_engines, layout.size)
        self._process = process
        self.own = self.pages[process, engine]

    @staticmethod
    def create(file: Path, layout: MetricsLayout, *, num_api: int, num_engines: int = 1) -> None:
        np.zeros((1 + num_api, num_engines, layout.size)).tofile(file)

    @property
    def num_engines(self) -> int:
        return self.pages.shape[1]

    def of_engine(self, engine: int) -> "MetricsPages":
        """Return the same pages, but such that counts go to the page of the engine with this index."""
        other = copy.copy(self)
        other.own = self.pages[self._process, engine]
        return other

    def take_page(self, engine: int, page: bytes) -> None:
        """Store the page (bytes of float64 values) that an engine core on another machine has sent. All API
        server processes receive the same page, so each may store it. A page of another size is ignored."""
        values = np.frombuffer(page)
        if len(values) == self.layout.size:
            self.pages[0, engine] = values

    def clear_gauges(self) -> None:
        """Set the gauges of the page to 0, after the process that wrote it has ended."""
        labelled = (f"{name}:{value}" for name in LABELLED_GAUGES for value in LABELLED[name][2])
        for name in [*GAUGES, *labelled]:
            self._set(name, 0)

    def start(self, max_num_seqs: int) -> None:
        """Set the gauges that the engine core sets once, when it is ready."""
        self._set("engine_start_time_seconds", time.time())
        self._set("max_num_seqs", max_num_seqs)

    def observe(self, step: StepStats, front: FrontStats) -> None:
        """Count a step. `step` has the engine core's statistics, `front` those of an API server process."""
        self._set("num_requests_running", step.num_running)
        self._set("num_requests_waiting", step.num_waiting)
        self._set("num_requests_waiting_by_reason:capacity", step.num_waiting - step.num_deferred)
        self._set("num_requests_waiting_by_reason:deferred", step.num_deferred)
        for level, state in enumerate(LABELLED["engine_sleep_state"][2]):
            self._set(f"engine_sleep_state:{state}", level == step.sleep_level)
        self._set("kv_cache_usage_perc", step.kv_usage)
        self._set("gpu_cache_usage_perc", step.kv_usage)
        self._add("prefix_cache_queries", step.prefix_queries)
        self._add("prefix_cache_hits", step.prefix_hits)
        for reason in step.misses:
            self._add(f"prefix_cache_misses:{reason}", 1)
        self._add("num_preemptions", step.num_preempted)
        self._add("kv_event_batches_dropped", step.num_dropped_events)
        # Counted at the first token of a request, so that recomputation after preemption is not counted.
        self._add("prompt_tokens", step.num_prompt_tokens)
        self._add("prompt_tokens_cached", step.num_cached_tokens)
        self._add("prompt_tokens_by_source:local_cache_hit", step.num_cached_tokens - step.num_loaded_tokens)
        self._add("prompt_tokens_by_source:external_kv_transfer", step.num_loaded_tokens)
        self._add("prompt_tokens_by_source:local_compute", step.num_prompt_tokens - step.num_cached_tokens)
        if step.num_drafts:
            accepted = step.num_accepted_by_position
            sums = (step.num_drafts, step.num_draft_tokens, sum(accepted))
            for name, count in zip(DRAFT_COUNTERS, sums, strict=True):
                self._add(name, count)
            for place, count in enumerate(accepted):
                self._add(f"{ACCEPTED}:{place}", count)
        if step.tiers is not None:
            kv_offload.observe(step.tiers, self._add, self._record_many, self._set)
        if step.num_computed_tokens:
            self._record("iteration_tokens_total", step.num_computed_tokens)
        self.observe_front(front)

    def observe_front(self, front: FrontStats) -> None:
        self._add("generation_tokens", front.num_tokens)
        self._record_many(("time_to_first_token_seconds",), front.first_token_s)
        self._record_many(
            ("inter_token_latency_seconds", "time_per_output_token_seconds"), front.between_tokens_s
        )
        for ended in front.finished:
            self._observe_end(ended)

    def _observe_end(self, ended: FinishedSequence) -> None:
        self._add(f"request_success:{ended.reason}", 1)
        times = ended.times
        if ended.slo_result:
            self._add(f"slo_requests:{ended.slo_result}", 1)
        self._record("request_prompt_tokens", ended.num_prompt_tokens)
        self._record("request_generation_tokens", ended.num_output_tokens)
        self._record("request_prefill_kv_computed_tokens", ended.num_prompt_tokens - ended.num_cached)
        if ended.longest is not None:
            self._record("request_max_num_generation_tokens", ended.longest)
            self._record("request_params_n", ended.params.n)
        if ended.params.max_tokens is not None:
            self._record("request_params_max_tokens", ended.params.max_tokens)
        self._record("e2e_request_latency_seconds", time.time() - ended.arrived_at)
        if not ended.num_output_tokens:
            return
        decode = times.last_token_at - times.first_token_at
        self._record("request_queue_time_seconds", times.scheduled_at - times.queued_at)
        self._record("request_prefill_time_seconds", times.first_token_at - times.scheduled_at)
        self._record("request_decode_time_seconds", decode)
        self._record("request_inference_time_seconds", times.last_token_at - times.scheduled_at)
        if ended.num_output_tokens > 1:
            self._record("request_time_per_output_token_seconds", decode / (ended.num_output_tokens - 1))

    def count_refused(self) -> None:
        """Count a request that was refused because it would have missed its latency target."""
        self._add("slo_requests:refused", 1)

    def count_resumed(self) -> None:
        """Count a request that continues on another or a restarted engine core after a crash."""
        self._add("request_resumed", 1)

    def observe_media(self, queries: int, hits: int) -> None:
        """Count `queries` items looked up in the multimodal cache, and `hits` items found there."""
        self._add("mm_cache_queries", queries)
        self._add("mm_cache_hits", hits)

    def observe_http(self, exchange: Exchange) -> None:
        counter, observations = exchange.additions
        self._add(counter, 1)
        for name, value in observations.items():
            self._record(name, value)

    def _set(self, name: str, value: float) -> None:
        self.own[self.layout.places[name]] = value

    def _add(self, name: str, value: float) -> None:
        if value:
            self.own[self.layout.places[name]] += value

    def _record(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        place, edges = self.layout.places[name], self.layout.edges[name]
        self.own[place + bisect_left(edges, value)] += 1
        self.own[place + len(edges) + 1] += value

    def _record_many(self, names: tuple[str, ...], values: list[float]) -> None:
        """Add observations to histograms that have the same bounds."""
        if not values:
            return
        edges = self.layout.edges[names[0]]
        counts = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1)
        for name in names:
            place = self.layout.places[name]
            self.own[place : place + len(edges) + 1] += counts
            self.own[place + len(edges) + 1] += sum(values)

    def observe_rates(self, prompt_tok_s: float, generation_tok_s: float) -> None:
        self._set("avg_prompt_throughput_toks_per_s", prompt_tok_s)
        self._set("avg_generation_throughput_toks_per_s", generation_tok_s)

    def value(self, name: str, engine: int | None = None) -> float:
        """Return a gauge or counter summed over all processes, for the engine with this index; None: all."""
        values = self.pages[:, :, self.layout.places[name]]
        return float((values if engine is None else values[:, engine]).sum())
