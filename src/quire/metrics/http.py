"""The HTTP requests that are counted, and the names of their series in a metrics page."""

from dataclasses import dataclass

POOLING_ROUTES = (
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
_POST_ROUTES = (
    *(f"/v1/chat/completions/{name}" for name in ("batch", "render", "derender")),
    *("/v1/completions/render", "/v1/completions/derender", "/inference/v1/generate"),
    *("/generative_scoring", "/invocations", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", *POOLING_ROUTES),
    *("/tokenize", "/detokenize", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
OPERATE_ROUTES = {
    "POST": "sleep wake_up pause resume collective_rpc abort_requests reset_mm_cache reset_encoder_cache"
    " start_profile stop_profile init_weight_transfer_engine start_weight_update start_draft_weight_update"
    " update_weights finish_weight_update update_weight_version",
    "GET": "is_sleeping is_paused get_world_size tokenizer_info weight_info",
}
HANDLERS = {
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    "/v1/responses": ("POST",),
    "/v1/responses/{response_id}": ("GET", "DELETE"),
    "/v1/responses/{response_id}/cancel": ("POST",),
    "/v1/responses/{response_id}/input_items": ("GET",),
    **dict.fromkeys(_POST_ROUTES, ("POST",)),
    "/v1/models": ("GET",),
    "/v1/models/{name:any}": ("GET",),
    "/reset_prefix_cache": ("POST",),
    **{f"/{name}": (method,) for method, names in OPERATE_ROUTES.items() for name in names.split()},
    "/openapi.json": ("GET",),
    "none": ("GET", "POST", "OTHER"),
}
"""Routes whose requests are counted, each with its methods; `none` is every path without a route."""
UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
STATUSES = ("2xx", "3xx", "4xx", "5xx")

COUNTED = [(handler, method) for handler, methods in HANDLERS.items() for method in methods]
"""Every counted pair of route and HTTP method."""
_COARSE = [0.1, 0.5, 1.0]
_FINE = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    *(2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
]

SERIES = [f"http_requests {method} {handler} {status}" for handler, method in COUNTED for status in STATUSES]
"""Names of the counters in a metrics page."""
EDGES: dict[str, list[float]] = {
    "http_request_duration_highr_seconds": _FINE,
    **{f"http_request_duration_seconds {method} {handler}": _COARSE for handler, method in COUNTED},
    **{f"http_request_size_bytes {handler}": [] for handler in HANDLERS},
    **{f"http_response_size_bytes {handler}": [] for handler in HANDLERS},
}
"""Upper bucket bounds of each histogram, by its name in a metrics page, in seconds or bytes; a histogram
without bounds has only a count and a sum."""


@dataclass(slots=True)
class Exchange:
    """A completed HTTP request with its response: route, method, status, duration and body sizes."""

    handler: str
    method: str
    status: int
    seconds: float
    request_bytes: int
    response_bytes: int

    @property
    def additions(self) -> tuple[str, dict[str, float]]:
        """Return the name of the counter to increase by 1, and the values to add to histograms, by name."""
        handler = self.handler if self.method in HANDLERS.get(self.handler, ()) else "none"
        method = self.method if self.method in HANDLERS[handler] else "OTHER"
        status = f"{min(max(self.status // 100, 2), 5)}xx"
        return f"http_requests {method} {handler} {status}", {
            "http_request_duration_highr_seconds": self.seconds,
            f"http_request_duration_seconds {method} {handler}": self.seconds,
            f"http_request_size_bytes {handler}": self.request_bytes,
            f"http_response_size_bytes {handler}": self.response_bytes,
        }
