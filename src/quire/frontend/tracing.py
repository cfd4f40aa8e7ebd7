"""OpenTelemetry traces: a span for each request, with spans for queue, prefill and decode."""

import importlib
import os
from contextvars import ContextVar
from typing import Any

from quire.config.engine import EngineConfig
from quire.data.outputs import RequestOutput, RequestStateStats
from quire.data.params import SamplingParams
from quire.errors import ConfigError
from quire.frontend.outputs import AnyOutput
from quire.version import __version__

PARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""The client's span: the header `traceparent` of the current HTTP request."""
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
_NS = 1_000_000_000


class Tracer:
    """Exports spans in batches in a background thread; spans are dropped if the endpoint is unavailable."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._model = model
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                "otlp_traces_endpoint needs OpenTelemetry: pip install 'quire[otel]', or remove it"
            ) from None
        name = os.environ.get("OTEL_SERVICE_NAME", "quire")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._provider = provider
        self._tracer = provider.get_tracer("quire", __version__)
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()

    def ended(self, output: AnyOutput, params: SamplingParams, parent: str) -> None:
        """Export the span of a finished request with its measured times. Pooling requests have no times:
        nothing is exported for them."""
        if not isinstance(output, RequestOutput) or (stats := output.metrics) is None or not stats.queued_ts:
            return
        kind = self._trace.SpanKind.SERVER
        context = self._propagator.extract({"traceparent": parent}) if parent else None
        begun = int(stats.arrival_time * _NS)
        attributes = {**self._attributes(output, stats), **_request_attributes(params)}
        span = self._tracer.start_span(
            "llm_request", context=context, kind=kind, start_time=begun, attributes=attributes
        )
        within = self._trace.set_span_in_context(span)
        arrived = stats.last_token_ts - stats.latency
        for name, first, last in (
            ("queue", stats.queued_ts, stats.scheduled_ts),
            ("prefill", stats.scheduled_ts, stats.first_token_ts),
            ("decode", stats.first_token_ts, stats.last_token_ts),
        ):
            if 0 < first <= last:
                start, end = (begun + int((time - arrived) * _NS) for time in (first, last))
                self._tracer.start_span(name, context=within, start_time=start).end(end)
        span.end(begun + int(stats.latency * _NS))

    def _attributes(self, output: RequestOutput, stats: RequestStateStats) -> dict[str, Any]:
        return {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": output.request_id,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids or ()),
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.usage.cached_tokens": output.num_cached_tokens or 0,
            "gen_ai.latency.e2e": stats.latency,
            "gen_ai.latency.time_to_first_token": stats.first_token_latency,
            "gen_ai.latency.time_in_queue": stats.scheduled_ts - stats.queued_ts,
            "gen_ai.latency.time_in_model_prefill": stats.first_token_ts - stats.scheduled_ts,
            "gen_ai.latency.time_in_model_decode": stats.last_token_ts - stats.first_token_ts,
            "quire.preemptions": stats.num_preemptions,
        }

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def _request_attributes(params: SamplingParams) -> dict[str, Any]:
    attributes = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get(_PROTOCOL) or ("http/protobuf" if "/v1/traces" in endpoint else "grpc")
    if protocol not in _EXPORTERS:
        raise ConfigError(f"{_PROTOCOL}={protocol!r} is not supported; known: {', '.join(_EXPORTERS)}")
    try:
        module = importlib.import_module(_EXPORTERS[protocol])
    except ImportError:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs the exporter of {protocol}, which is missing: "
            f"pip install opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}, or set {_PROTOCOL}"
        ) from None
    return module.OTLPSpanExporter(endpoint=endpoint)


def tracer_of(config: EngineConfig) -> Tracer | None:
    endpoint = config.observability.otlp_traces_endpoint
    return Tracer(endpoint, config.model.served_model_name[0]) if endpoint else None
