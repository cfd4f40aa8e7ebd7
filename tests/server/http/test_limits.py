"""Tests of API keys, body sizes and content types, which are checked before any route."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ask import CHAT, MESSAGES, ask, refused

from quire.server.http.limits import AdmissionMiddleware
from quire.server.key_limits import Ledger
from quire.server.settings import make_settings

KEYS = {"api_key": ["secret", "other"]}


@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/version", "/load", "/openapi.json", "/docs", "/nope"]
)
def test_every_route_needs_the_api_key(path: str) -> None:
    """vLLM leaves /tokenize and others without a key."""
    response = ask("GET", path, settings=KEYS)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 401 and error["type"] == "AuthenticationError"
    assert error["message"].startswith("Unauthorized: the API key is missing or wrong")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200),
        ("bearer other", 200),
        ("Bearer secre", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer", 401),
    ],
)
def test_only_known_bearer_keys_are_accepted(header: str, status: int) -> None:
    response = ask("GET", "/v1/models", settings=KEYS, headers={"authorization": header})
    assert response.status_code == status


def test_probes_and_preflights_need_no_key_by_default() -> None:
    assert all(
        ask("GET", path, settings=KEYS).status_code == 200 for path in ("/health", "/ping", "/metrics", "/")
    )
    guarded = KEYS | {"api_key_exempt": "/health"}
    assert ask("GET", "/metrics", settings=guarded).status_code == 401
    preflight = {"origin": "http://a", "access-control-request-method": "POST"}
    assert ask("OPTIONS", CHAT, settings=KEYS, headers=preflight).status_code == 200


@pytest.mark.parametrize(("header", "num_opened"), [([], 0), ([(b"authorization", b"Bearer secret")], 1)])
def test_web_sockets_need_the_api_key(header: list[tuple[bytes, bytes]], num_opened: int) -> None:
    """The server has none itself, but a middleware may."""
    opened: list[Any] = []

    async def web_socket(scope: Any, receive: Any, send: Any) -> None:
        opened.append(scope["path"])

    ledger = Ledger(make_settings(KEYS).keys, None)
    gate = AdmissionMiddleware(
        web_socket, ledger=ledger, open_paths=frozenset(), max_body_bytes=1, echo_request_id=False
    )
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": header}
    asyncio.run(gate(scope, None, None))  # type: ignore[arg-type]
    assert len(opened) == num_opened


def test_paths_that_extend_an_exempt_path_need_a_key() -> None:
    assert all(ask("GET", path, settings=KEYS).status_code == 401 for path in ("/health/x", "/healthy"))


def test_large_body_is_413_with_and_without_content_length() -> None:
    small = {"max_request_body_bytes": 100}
    assert (
        "larger than 100 bytes"
        in refused(ask("POST", CHAT, settings=small, json={"x": "y" * 200}), 413)["message"]
    )

    async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b'{"messages": "' + b" " * num_bytes

    headers = {"content-type": "application/json"}
    for num_bytes in (50, 200):  # sizes of the first piece
        response = ask("POST", CHAT, settings=small, content=pieces(num_bytes), headers=headers)
        assert "larger than 100 bytes" in refused(response, 413)["message"]


@pytest.mark.parametrize("length", ["0" * 20 + "200", "0" * 17 + "200", "9" * 30, "-1", "1_0", ""])
def test_content_length_is_parsed_completely(length: str) -> None:
    """Leading zeros, or a value that is no number, must not let a large body through."""
    headers = {"content-type": "application/json", "content-length": length}
    body = b'{"messages": "' + b" " * 200
    refused(ask("POST", CHAT, settings={"max_request_body_bytes": 100}, content=body, headers=headers), 413)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_only_json_content_is_accepted(kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    error = refused(ask("POST", CHAT, content=b'{"messages": []}', headers=headers))
    assert error["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


def test_json_with_a_charset_is_accepted() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert ask("POST", CHAT, content=body, headers=headers).status_code == 200


def test_post_without_a_body_needs_no_content_type() -> None:
    assert ask("POST", "/ping").status_code == 200


def test_request_id_header_needs_its_flag() -> None:
    kwargs: dict[str, Any] = {"json": {"messages": MESSAGES}, "headers": {"x-request-id": "abc"}}
    plain = ask("POST", CHAT, **kwargs)
    assert plain.json()["id"] == "chatcmpl-abc" and "x-request-id" not in plain.headers
    with_header = ask("POST", CHAT, settings={"enable_request_id_headers": True}, **kwargs)
    assert with_header.headers["x-request-id"] == "abc"


def test_a_client_without_a_request_id_gets_that_of_the_response() -> None:
    kwargs: dict[str, Any] = {"settings": {"enable_request_id_headers": True}}
    answer = ask("POST", CHAT, json={"messages": MESSAGES}, **kwargs)
    assert len(answer.headers["x-request-id"]) == 32
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    refusal = ask("POST", CHAT, content=b"x", headers={"content-type": "text/plain"}, **kwargs)
    assert refusal.status_code == 400 and len(refusal.headers["x-request-id"]) == 32


def test_cors_allows_configured_origins() -> None:
    headers, settings = {"origin": "http://a"}, {"allowed_origins": ["*"]}
    reply = ask("GET", "/health", headers=headers, settings=settings)
    assert reply.headers["access-control-allow-origin"] == "*"
    only = {"allowed_origins": ["http://b"]}
    assert "access-control-allow-origin" not in ask("GET", "/health", headers=headers, settings=only).headers
