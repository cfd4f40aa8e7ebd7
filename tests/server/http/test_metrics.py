"""Every exchange is counted, under the names that dashboards know."""

import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask
from fake_engine import FakeEngine
from starlette.routing import Route

from quire.metrics import EngineMetrics, MetricsLayout, MetricsPages
from quire.metrics.http import HANDLERS, UNCOUNTED, Exchange
from quire.server.app import Application
from quire.server.settings import make_settings


def counted(method: str, path: str, **given: object) -> list[tuple[str, str, int]]:
    engine = FakeEngine()
    ask(
        method,
        path,
        engine=engine,
        settings={"api_key": ["k"]} if "key" in given else {},
        json=given.get("json"),
    )
    return [(each.handler, each.method, each.status) for each in engine.exchanges]


def test_answers_streams_errors_and_strangers_are_counted() -> None:
    body = {"messages": MESSAGES}
    assert counted("POST", CHAT, json=body) == [(CHAT, "POST", 200)]
    assert counted("POST", CHAT, json={**body, "stream": True}) == [(CHAT, "POST", 200)]
    assert counted("POST", COMPLETIONS, json={"prompt": 3}) == [(COMPLETIONS, "POST", 400)]
    assert counted("POST", COMPLETIONS, json={"prompt": "a"}, key=True) == [(COMPLETIONS, "POST", 401)]
    assert counted("GET", "/v1/models/fake") == [("/v1/models/{name:any}", "GET", 200)]
    assert counted("GET", "/nowhere") == [("none", "GET", 404)]
    assert counted("DELETE", "/nowhere") == [("none", "DELETE", 404)]


@pytest.mark.parametrize("path", sorted(UNCOUNTED - {"/server_info"}))
def test_an_operators_looks_are_not_traffic(path: str) -> None:
    assert counted("GET", path) == []


def test_every_route_has_a_name_of_its_own() -> None:
    """A route that is added to the application has to be added to the metrics."""
    app = Application(FakeEngine(), make_settings({}))
    routes = {route.path for route in app.routes.routes if isinstance(route, Route)}
    ours = {path for path in routes if not path.startswith(("/docs", "/redoc", "/page"))} - UNCOUNTED - {"/"}
    assert ours <= HANDLERS.keys(), ours - HANDLERS.keys()


def test_families_carry_what_was_counted() -> None:
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
