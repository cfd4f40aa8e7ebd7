"""Routes that need no key, and requests that resemble them (CVE-2026-48746): vLLM guarded /v1 alone, and
took the path from a URL that starlette builds from the Host header. Quire guards every route by its path
except a fixed few, and no header affects that."""

import pytest
from ask import status_of
from fake_engine import FakeEngine
from starlette.routing import Route

from quire.config.env import Env
from quire.server.app import Application
from quire.server.settings import make_settings

KEYS = {"api_key": ["secret"]}
OPEN = {"/health", "/ping", "/metrics", "/", "/page/{name}"}
"""Health probes, and the files of the web page, which asks for the key itself."""


def full_application() -> Application:
    """Return an application with every route that any setting may add."""
    engine = FakeEngine()
    engine.operation.settings["lora"] = {"enable_lora": True}
    engine.operation.settings["observability"] = {"profiler_config": {"profiler": "torch"}}
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    settings = KEYS | {"enable_tokenizer_info_endpoint": True}
    return Application(engine, make_settings(settings, env=Env.read(env)))


@pytest.fixture(scope="module")
def application() -> Application:
    return Application(FakeEngine(), make_settings(KEYS))


def test_every_route_needs_the_key() -> None:
    application = full_application()
    guarded = 0
    for route in application.routes.routes:
        assert isinstance(route, Route)
        if route.path in OPEN:
            continue
        path = route.path.replace("{name:any}", "x").replace("{response_id}", "x")
        for method in route.methods or ():
            guarded += 1
            assert status_of(application, path, {b"host": b"test"}, method=method) == 401, (method, path)
    assert guarded > 60


@pytest.mark.parametrize(
    "path",
    [
        *("/health/x", "/healthy", "/health/../v1/models", "/v1/models/../../health", "//health", "/health/"),
        *("/health%2f..%2fv1/models", "/HEALTH", "/health\0", "/page/../v1/models", "/page/events", "/nope"),
        *("/v1/models?/health", "/v1/models;/health", "http://x/health", "*", ""),
    ],
)
def test_paths_that_resemble_an_exempt_path_need_the_key(application: Application, path: str) -> None:
    assert status_of(application, path, {b"host": b"test"}) == 401


@pytest.mark.parametrize(
    "headers",
    [
        *(
            {b"host": host}
            for host in (b"x/health?", b"x/health#", b"x/metrics?a=", b"/health", b"", b"x@y/")
        ),
        {},
        *({name: b"/health"} for name in (b"x-original-url", b"x-rewrite-url", b"x-forwarded-uri")),
        {b"x-forwarded-prefix": b"/v1", b"x-forwarded-host": b"x/health?"},
        {b"forwarded": b"for=127.0.0.1;host=x/health"},
        {b"x-http-method-override": b"OPTIONS"},
        {b"x-forwarded-for": b"127.0.0.1", b"x-real-ip": b"127.0.0.1"},
    ],
    ids=repr,
)
def test_no_header_bypasses_the_key(application: Application, headers: dict[bytes, bytes]) -> None:
    assert status_of(application, "/v1/models", headers) == 401
    key = {b"authorization": b"Bearer secret"}
    assert status_of(application, "/v1/models", headers | key) == 200


def test_exempt_routes_are_the_documented_ones(application: Application) -> None:
    strict = Application(FakeEngine(), make_settings(KEYS | {"api_key_exempt": ""}))
    for path in ("/health", "/ping", "/metrics", "/"):
        assert status_of(application, path, {}) == 200
        assert status_of(strict, path, {}) == (200 if path == "/" else 401)
