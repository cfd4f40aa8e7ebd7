"""Tests of the operator routes and of the OpenAPI document."""

import asyncio

import httpx
from ask import COMPLETIONS, ask, refused
from fake_engine import FakeEngine
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.metrics.http import POOLING_ROUTES
from quire.server.app import Application
from quire.server.settings import make_settings


def test_health_reports_the_cause() -> None:
    engine = FakeEngine()
    good = ask("GET", "/health", engine=engine)
    assert good.status_code == 200 and good.content == b""
    engine.dead = "no progress for 31 s"
    assert refused(ask("GET", "/health", engine=engine), 503)["message"] == "no progress for 31 s"
    for method in ("GET", "POST"):
        refused(ask(method, "/ping", engine=engine), 503)


def test_models_lists_every_served_name() -> None:
    engine = FakeEngine()
    engine.facts.model_names = ("org/name", "other")
    reply_body = ask("GET", "/v1/models", engine=engine).json()
    assert [card["id"] for card in reply_body["data"]] == ["org/name", "other"] and reply_body[
        "object"
    ] == "list"
    card = ask("GET", "/v1/models/org/name", engine=engine).json()
    assert card == reply_body["data"][0] and card["max_model_len"] == 512 and card["root"] == "models/fake"
    assert card["permission"][0]["id"].startswith("modelperm-")
    for name in ("none", "a%0Ab", "none%0A"):
        refused(ask("GET", f"/v1/models/{name}", engine=engine), 404)
    slash = ask("GET", "/v1/models/", engine=engine)
    assert slash.status_code == 307 and slash.headers["location"] == "http://test/v1/models"


def test_models_is_503_until_the_engine_is_ready() -> None:
    """Clients poll this route to find out when a server is ready."""
    engine = FakeEngine()
    engine.dead = "the engine is starting"
    assert refused(ask("GET", "/v1/models", engine=engine), 503)["message"] == "the engine is starting"


def test_version_load_and_metrics() -> None:
    engine = FakeEngine()
    assert ask("GET", "/version", engine=engine).json() == {"version": "1.2.3"}
    engine.num_in_flight = 7
    assert ask("GET", "/load", engine=engine).json() == {"server_load": 7}
    metrics = ask("GET", "/metrics", engine=engine)
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4") and "vllm:" in metrics.text


def test_reason_for_invalid_json_is_named() -> None:
    body = {"content": b'{"messages": [}', "headers": {"content-type": "application/json"}}
    error = ask("POST", "/v1/chat/completions", **body).json()["error"]
    assert "'msg': 'JSON decode error', 'ctx': {'error': 'Expecting value'}" in error["message"]


def test_unknown_route_is_404_and_wrong_method_405() -> None:
    """The text is also at `error.message`, which is all that OpenAI's client shows."""
    error = {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}
    assert ask("GET", "/nope").json() == {"detail": "Not Found", "error": error}
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completion", "/chat/completion"):
        meant = ask("POST", path, json={}).json()
        assert meant["detail"] == "Not Found; did you mean /v1/chat/completions?", path
        assert meant["error"]["message"] == meant["detail"]
    wrong = ask("GET", "/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == wrong.json()["detail"] == "Method Not Allowed"


def test_document_is_complete_and_has_400_instead_of_422() -> None:
    document = ask("GET", "/openapi.json").json()
    expected = {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize",
        "/detokenize", *POOLING_ROUTES, "/health", "/ping", "/version", "/load", "/metrics",
        "/v1/messages", "/v1/messages/count_tokens", "/invocations", "/inference/v1/generate",
        "/generative_scoring",
        "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/chat/completions/batch",
        "/v1/completions/render", "/v1/completions/derender",
        "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
    }  # fmt: skip
    assert set(document["paths"]) == expected
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", *POOLING_ROUTES):
        assert {"400", "404", "413"} <= document["paths"][path]["post"]["responses"].keys()
    assert (
        "HTTPValidationError" not in str(document)
        and "422" in document["paths"]["/tokenize"]["post"]["responses"]
    )
    content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}


def test_documents_can_be_disabled() -> None:
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert ask("GET", path).status_code == 200
        assert ask("GET", path, settings={"disable_fastapi_docs": True}).status_code == 404


def test_root_path_is_no_part_of_a_route() -> None:
    """With --root-path, JSON bodies do not go through FastAPI, and status routes are not counted."""
    engine = FakeEngine()
    application = Application(engine, make_settings({"root_path": "/api"}))

    async def fastapi(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] == "GET", "the fast path is not used"
        await Response()(scope, receive, send)

    application.inner._app = fastapi  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(application.asgi, root_path="/api")

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://test/api") as client:
            completion = await client.post(COMPLETIONS, json={"prompt": "ab"})
            return [completion.status_code, (await client.get("/metrics")).status_code]

    assert asyncio.run(statuses()) == [200, 200]
    assert [exchange.handler for exchange in engine.exchanges] == [COMPLETIONS]


def test_unknown_route_below_a_root_path_has_a_hint() -> None:
    application = Application(FakeEngine(), make_settings({"root_path": "/api"}))
    transport = httpx.ASGITransport(application.asgi, root_path="/api")

    async def message() -> str:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/api/v1/chat/completion", json={})
            return str(answer.json()["error"]["message"])

    assert asyncio.run(message()) == "Not Found; did you mean /v1/chat/completions?"
