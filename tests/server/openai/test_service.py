"""Tests of request ids, priorities and request logs."""

import logging

import pytest
from ask import CHAT, MESSAGES, ask, chat, complete, refused
from fake_engine import FakeEngine


def test_request_id_from_header_and_body() -> None:
    engine = FakeEngine()
    assert chat(engine, request_id="mine").json()["id"] == "chatcmpl-mine"
    body = {"messages": MESSAGES, "request_id": "mine"}
    assert ask("POST", CHAT, json=body, headers={"x-request-id": "h"}).json()["id"] == "chatcmpl-h"
    assert complete(prompt=["a", "b"], request_id="m").json()["id"] == "cmpl-m"
    assert chat().json()["id"] != chat().json()["id"]


def test_long_request_id_is_400() -> None:
    """Each sequence of a call carries the id: a long one, many times over, would fill the memory."""
    assert chat(request_id="x" * 256).status_code == 200
    assert refused(chat(request_id="x" * 257))["param"] == "request_id"
    assert refused(complete(prompt=["a", "b"], request_id="x" * 10**6))["param"] == "request_id"
    long = {"x-request-id": "x" * 257}
    assert refused(ask("POST", CHAT, json={"messages": MESSAGES}, headers=long))["param"] == "request_id"


@pytest.mark.parametrize("id", ["two\nlines", "\x1b[31mred", "\u2028", "\x85", "\u202egnirts"])
def test_unprintable_request_id_is_400(id: str) -> None:
    error = refused(chat(request_id=id))
    assert error["param"] == "request_id" and "printed" in error["message"]
    assert error["message"].isprintable()


def test_priority_header_overrides_the_body() -> None:
    engine = FakeEngine()
    ask(
        "POST",
        CHAT,
        engine=engine,
        json={"messages": MESSAGES, "priority": 1},
        headers={"x-vllm-priority": "-7"},
    )
    assert engine.seen[0][3] == -7


@pytest.mark.parametrize(
    "headers",
    [
        {"x-vllm-priority": "high"},
        {"x-vllm-priority": "9" * 30},
        {"x-vllm-priority": "²"},
        {"x-data-parallel-rank": "1"},
    ],
)
def test_invalid_headers_are_400(headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    refused(ask("POST", CHAT, json={"messages": MESSAGES}, headers=encoded))


@pytest.mark.parametrize("stream", [False, True])
def test_requests_and_outputs_are_logged_if_enabled(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("quire.server")
    logger.addHandler(handler)
    try:
        settings = {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 4}
        chat(settings=settings, request_id="r", stream=stream)
        chat(request_id="unlogged")
    finally:
        logger.removeHandler(handler)
    assert (
        len(lines) == 2 and lines[0].startswith("Received request chatcmpl-r") and lines[0].endswith("'user'")
    )
    assert lines[1] == "Generated response chatcmpl-r: 'Hell'"
