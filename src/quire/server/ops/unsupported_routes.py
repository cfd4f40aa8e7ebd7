"""Routes of vLLM that this server does not have: each answers 404 with its name and an alternative."""

from fastapi import FastAPI, Request

from quire.server.http.errors import NotFound

ABSENT_ROUTES = {
    "/v1/realtime": "audio is not streamed in; /v1/audio/transcriptions takes a whole file",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/scale_elastic_ep": "the number of engines is fixed at start; scale by replicas behind a gateway",
    "/is_scaling_elastic_ep": "the number of engines is fixed at start",
    "/fault_tolerance/apply": "engines that die are restarted at once; see /health",
    "/fault_tolerance/status": "see /health and the metric vllm:request_resumed_total",
}
"""Reason or alternative by path; docs/migration.md lists the same."""


def add_absent_routes(app: FastAPI) -> None:
    for path in ABSENT_ROUTES:
        app.add_api_route(path, _refuse, methods=["GET", "POST"], include_in_schema=False)


def _refuse(request: Request) -> None:
    path = request.scope["route"].path
    raise NotFound(f"{path} is not supported: {ABSENT_ROUTES[path]}")
