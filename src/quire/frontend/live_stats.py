"""LiveView: recent statistics of the engine for dashboards."""

import base64
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.data.latency_target import LatencyTarget
from quire.data.outputs import RequestStateStats
from quire.data.stats import SLO_RESULTS
from quire.data.timeline import RequestTimeline
from quire.errors import EngineError
from quire.frontend.engine_facts import EngineFacts
from quire.metrics.pages import MetricsPages
from quire.metrics.tables import FINISH_REASONS

WINDOW = 1000
"""Number of recent observations from which percentiles are computed."""


RECENT, SLOWEST = 500, 6
"""Number of recent finished requests that are kept, and number of the slowest of them that are shown."""


class _Ended(NamedTuple):
    latency_s: float
    id: str
    num_prompt: int
    num_cached: int
    stats: RequestStateStats


class LiveView:
    """Statistics for the dashboard: recent rates, latency percentiles, the slowest requests, and a map of the
    KV cache blocks."""

    def __init__(self) -> None:
        self._first: deque[float] = deque(maxlen=WINDOW)
        self._between: deque[float] = deque(maxlen=WINDOW)
        self._counts: deque[tuple[float, float, float]] = deque(maxlen=12)
        self._ended: deque[_Ended] = deque(maxlen=RECENT)
        self._map = b""
        self._fetching = False

    def add(self, first_token_s: list[float], between_tokens_s: list[float]) -> None:
        self._first.extend(first_token_s)
        self._between.extend(between_tokens_s)

    def ended(self, output: Any) -> None:
        """Record the times of a finished request; a pooling request has none and is ignored."""
        if (stats := getattr(output, "metrics", None)) is not None:
            num_prompt, num_cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
            self._ended.append(_Ended(stats.latency, output.request_id, num_prompt, num_cached, stats))

    async def fetch_map(self, call: Callable[[], Awaitable[bytes]]) -> None:
        if self._fetching:
            return
        self._fetching = True
        try:
            self._map = await call()
        except (EngineError, TimeoutError):
            self._map = b""
        finally:
            self._fetching = False

    def _slowest(self) -> list[dict[str, Any]]:
        """Return the timelines of the SLOWEST slowest recent requests as dicts, the slowest first."""
        slowest = heapq.nlargest(SLOWEST, self._ended, key=lambda ended: ended.latency_s)
        return [_describe(ended) for ended in slowest]

    def view(self, facts: EngineFacts, pages: MetricsPages) -> dict[str, Any]:
        """Return the statistics of all cores together, as a dict for the dashboard; `pages` are the cores'
        metrics pages."""
        queries = pages.value("prefix_cache_queries")
        ended = sum(pages.value(f"request_success:{reason}") for reason in FINISH_REASONS)
        return {
            "model": facts.model_names[0],
            "version": facts.version,
            "uptime_s": time.time() - facts.start_time,
            "running": int(pages.value("num_requests_running")),
            "waiting": int(pages.value("num_requests_waiting")),
            "max_num_seqs": facts.max_num_seqs,
            "kv_usage": pages.value("kv_cache_usage_perc") / pages.num_engines,
            "block_size": facts.block_size,
            "prefix_hit_rate": pages.value("prefix_cache_hits") / queries if queries else 0.0,
            "preemptions": int(pages.value("num_preemptions")),
            "requests_finished": int(ended),
            "targets": _describe_targets(facts.target, pages),
        } | self._recent(pages.value("prompt_tokens"), pages.value("generation_tokens"))

    def _recent(self, num_prompt: float, num_generated: float) -> dict[str, Any]:
        self._counts.append((time.monotonic(), num_prompt, num_generated))
        since, prompt, generated = self._counts[0]
        elapsed = max(self._counts[-1][0] - since, 1e-3)
        return {
            "prompt_tok_s": (num_prompt - prompt) / elapsed,
            "generation_tok_s": (num_generated - generated) / elapsed,
            "ttft_ms": _percentiles(self._first),
            "itl_ms": _percentiles(self._between),
            "slowest": self._slowest(),
            "blocks": base64.b64encode(self._map).decode(),
        }


def _describe(ended: _Ended) -> dict[str, Any]:
    timeline: dict[str, Any] = msgspec.to_builtins(RequestTimeline.of(ended.stats, ended.num_cached))
    num_output = ended.stats.num_generation_tokens
    return timeline | {"id": ended.id, "prompt_tokens": ended.num_prompt, "completion_tokens": num_output}


def _describe_targets(target: LatencyTarget, pages: MetricsPages) -> str | None:
    """Return a text with the latency targets, the share of the requests that met them, and the number of
    requests that missed them by kind of miss; None without targets."""
    if not target:
        return None
    parts = [("first token", target.ttft_s), ("between tokens", target.itl_s)]
    text = ", ".join(f"{name} {1e3 * seconds:g} ms" for name, seconds in parts if seconds)
    counts = {result: int(pages.value(f"slo_requests:{result}")) for result in SLO_RESULTS}
    if not (total := sum(counts.values())):
        return text
    missed = [
        f"{count} {result.replace('_', ' ')}"
        for result, count in counts.items()
        if count and result != "good"
    ]
    return f"{text}: {counts['good'] / total:.1%} good" + "".join(f", {part}" for part in missed)


def _percentiles(seconds: deque[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * 1e3, (50, 90, 99)).tolist()
    return dict(zip(("p50", "p90", "p99"), values, strict=True))
