"""The load of the engine as a response header, in the formats of ORCA (Open Request Cost Aggregation), which
load balancers request."""

import json

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.engine import AsyncEngine

FORMAT_HEADER, LOAD_HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"
"""Request header with the format, TEXT or JSON, and response header with the load."""
_METRICS = ("kv_cache_usage_perc", "num_requests_waiting")


def add_load_header(response: Response, request: Request, engine: AsyncEngine) -> None:
    """Add the header with the engine's load if the request asks for it in a known format."""
    format = request.headers.get(FORMAT_HEADER, "").upper()
    if format not in ("TEXT", "JSON"):
        return
    pages = engine.metrics.pages
    load = {name: pages.value(name) for name in _METRICS}
    load["kv_cache_usage_perc"] /= pages.num_engines
    fields = json.dumps({"named_metrics": load})
    if format == "TEXT":
        fields = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
    response.headers[LOAD_HEADER] = f"{format} {fields}"
