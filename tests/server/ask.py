"""Helpers that send requests to an application without a socket, and read streams."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from fake_engine import FakeEngine
from starlette.types import ASGIApp

from quire.checkpoint.pooling import PoolingFacts
from quire.config.env import Env
from quire.server.app import Application, inner_app, wrap
from quire.server.key_limits import Ledger
from quire.server.settings import make_settings

MESSAGES = [{"role": "user", "content": "hi"}]
EMBEDDER = PoolingFacts(task="embed", type="LAST", size=6, is_matryoshka=True)
CROSS_ENCODER = PoolingFacts(task="classify", type="CLS", size=1, labels=("fits",))
CLASSIFIER = PoolingFacts(task="classify", type="CLS", size=3, labels=("bad", "fair", "good"))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


_APPLICATIONS: dict[str, Application] = {}
_NEVER_SHARED = {"api_key", "lora_modules", "middleware"}


def application_of(engine: FakeEngine, settings: dict[str, Any], env: Env | None = None) -> Application:
    """Return an application for this engine. Declaring its routes takes most of the time of a small test, so
    they are declared once per set of settings; all that depends on the engine or keeps state between
    requests is built anew. An application with keys, adapters or middleware shares nothing."""
    made = make_settings(settings, env=env)
    if _NEVER_SHARED & settings.keys():
        return Application(engine, made)
    kind = (type(engine), engine.inputs.pooling, engine.facts, engine.operation.settings)
    declared_by = repr((settings, env, kind))
    application = _APPLICATIONS.get(declared_by)
    if application is None:
        application = _APPLICATIONS[declared_by] = Application(engine, made)
    else:
        # The routes refer to this Api object and to this feed: both get the new engine in place.
        application.api.__init__(engine, made)  # type: ignore[misc]
        application.feed.__init__(engine)  # type: ignore[misc]
        application.inner = inner_app(application.routes, application.api, made)
        application.asgi = wrap(application.inner, engine, made, Ledger(made.keys, None))
    return application


def ask(
    method: str,
    path: str,
    *,
    engine: FakeEngine | None = None,
    settings: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> httpx.Response:
    """Send one request to an application with these settings and environment variables."""
    environment = None if env is None else Env.read(env)
    application = application_of(engine or FakeEngine(), settings or {}, environment)
    return fetch(application.asgi, method, path, **kwargs)


def fetch(app: ASGIApp, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(go())


def client_of(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    """Return a client of an application; it answers 500 if an exception leaves the application."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", **options)


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def status_of(
    application: Application, path: str, headers: dict[bytes, bytes], *, method: str = "GET"
) -> int:
    """Return the status of a request with exactly this path and these headers; no client changes them."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"scheme": "http", "root_path": "", "http_version": "1.1", "server": ("127.0.0.1", 80)}
    asyncio.run(application.asgi({**scope, "headers": [*headers.items()]}, receive, send))
    status: int = sent[0]["status"]
    return status


def chat(
    engine: FakeEngine | None = None, settings: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    return ask("POST", CHAT, engine=engine, settings=settings, json={"messages": MESSAGES, **body})


def complete(
    engine: FakeEngine | None = None, settings: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    return ask("POST", COMPLETIONS, engine=engine, settings=settings, json={"prompt": "ab", **body})


def pool(
    path: str, engine: FakeEngine, settings: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    return ask("POST", path, engine=engine, settings=settings, json=body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must be one line each and end in [DONE]."""
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(len(part.splitlines()) == 1 and part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status
    return error
