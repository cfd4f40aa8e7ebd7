"""Bodies that cost more to parse than to send: JSON that nests thousands deep, or holds millions of small
values that become far larger objects. Quire refuses both on every route, and parses large bodies off the
event loop. The class is that of CVE-2025-62426: a small body that blocks other requests."""

import httpx
import pytest
from ask import fetch
from fake_engine import FakeEngine
from starlette.routing import Route

from quire.server.app import Application
from quire.server.http import fast_path
from quire.server.settings import make_settings

FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
DEPTH = 100_000


@pytest.fixture(scope="module")
def application() -> Application:
    return Application(FakeEngine(), make_settings({}))


def post(application: Application, path: str, content: str) -> httpx.Response:
    return fetch(
        application.asgi, "POST", path, content=content, headers={"content-type": "application/json"}
    )


@pytest.mark.parametrize("pair", ["[]", '{"a":}'], ids=["lists", "objects"])
def test_every_route_refuses_deeply_nested_bodies(application: Application, pair: str) -> None:
    opened, closed = pair[:-1], pair[-1]
    deep = opened * DEPTH + "1" + closed * DEPTH
    paths = [
        route.path.replace("{response_id}", "x")
        for route in application.routes.routes
        if isinstance(route, Route) and "POST" in (route.methods or ()) and route.path not in FORMS
    ]
    assert len(paths) > 20
    for path in paths:
        for content in (deep, f'{{"prompt": "a", "input": "a", "messages": {deep}}}'):
            status = post(application, path, content).status_code
            bodiless = path in ("/ping", "/reset_prefix_cache") or path.endswith("/cancel")
            assert status in (400, 404, 501) or bodiless, f"{path}: {status}"


@pytest.mark.parametrize(
    "value",
    [
        "[" + "1," * (fast_path._MAX_VALUES + 1) + "1]",
        "[" + "[ 1 ]," * (fast_path._MAX_PARTS + 1) + "1]",
        '{"a":[' + '{"abc":0},' * (fast_path._MAX_PARTS // 2 + 1) + "0]}",
    ],
    ids=["values", "lists", "objects"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_number_of_values_is_bounded(application: Application, path: str, value: str) -> None:
    reply = post(application, path, f'{{"metadata":{value}}}')
    assert reply.status_code == 400 and "send less at once" in reply.text, reply.text[:300]


def test_brackets_inside_strings_are_not_counted(application: Application) -> None:
    """A long prompt of commas and brackets is valid."""
    text = "[,{:" * (fast_path._MAX_PARTS + 1)
    reply = post(application, "/v1/completions", f'{{"prompt":"ab","user":"{text}"}}')
    assert reply.status_code == 200, reply.text[:300]
