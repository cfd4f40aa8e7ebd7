"""Tests of the HTTP metrics: every exchange is counted, under the usual metric names."""

import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask
from fake_engine import FakeEngine
from starlette.routing import Route

from quire.metrics.engine import EngineMetrics
from quire.metrics.http import HANDLERS, UNCOUNTED, Exchange
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.server.app import Application
from quire.server.ops.unsupported_routes import ABSENT_ROUTES
from quire.server.settings import make_settings


def counted(method: str, path: str, **kwargs: object) -> list[tuple[str, str, int]]:
    engine = FakeEngine()
    ask(
        method,
        path,
        engine=engine,
        settings={"api_key": ["k"]} if "key" in kwargs else {},
        json=kwargs.get("json"),
    )
    return [(exchange.handler, exchange.method, exchange.status) for exchange in engine.exchanges]


def test_answers_streams_and_errors_are_counted() -> None:
    body = {"messages": MESSAGES}
    assert counted("POST", CHAT, json=body) == [(CHAT, "POST", 200)]
    assert counted("POST", CHAT, json={**body, "stream": True}) == [(CHAT, "POST", 200)]
    assert counted("POST", COMPLETIONS, json={"prompt": 3}) == [(COMPLETIONS, "POST", 400)]
    assert counted("POST", COMPLETIONS, json={"prompt": "a"}, key=True) == [(COMPLETIONS, "POST", 401)]
    assert counted("GET", "/v1/models/fake") == [("/v1/models/{name:any}", "GET", 200)]
    assert counted("GET", "/nowhere") == [("none", "GET", 404)]
    assert counted("DELETE", "/nowhere") == [("none", "DELETE", 404)]


@pytest.mark.parametrize("path", sorted(UNCOUNTED - {"/server_info"}))
def test_operator_routes_are_not_counted(path: str) -> None:
    assert counted("GET", path) == []


def test_every_route_has_a_handler_label() -> None:
    """A route that is added to the application has to be added to the metrics; those that are always 404 have
    no label of their own."""
    app = Application(FakeEngine(), make_settings({}))
    routes = {route.path for route in app.routes.routes if isinstance(route, Route)}
    counted_routes = (
        {path for path in routes if not path.startswith(("/docs", "/redoc", "/page"))} - UNCOUNTED - {"/"}
    )
    counted_routes -= ABSENT_ROUTES.keys()
    assert counted_routes <= HANDLERS.keys(), counted_routes - HANDLERS.keys()


def test_metric_families_have_the_counted_values() -> None:
    pages = MetricsPages(MetricsLayout(100))
    metrics = EngineMetrics(pages, model_name="m", cache_info={})
    assert "http_requests_total{" not in metrics.text()
    for status, seconds in ((200, 0.3), (200, 0.05), (503, 2.0)):
        pages.observe_http(Exchange(CHAT, "POST", status, seconds, 100, 50))
    pages.observe_http(Exchange("none", "DELETE", 404, 0.001, 0, 10))
    lines = set(metrics.text().splitlines())
    chat = f'handler="{CHAT}"'
    assert {
        f'http_requests_total{{{chat},method="POST",status="2xx"}} 2.0',
        f'http_requests_total{{{chat},method="POST",status="5xx"}} 1.0',
        'http_requests_total{handler="none",method="OTHER",status="4xx"} 1.0',
        f'http_request_duration_seconds_bucket{{{chat},le="0.1",method="POST"}} 1.0',
        f'http_request_duration_seconds_count{{{chat},method="POST"}} 3.0',
        'http_request_duration_highr_seconds_bucket{le="0.5"} 3.0',
        f"http_request_size_bytes_sum{{{chat}}} 300.0",
        f"http_response_size_bytes_count{{{chat}}} 3.0",
    } <= lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert any(line.startswith("python_info{") for line in lines)
