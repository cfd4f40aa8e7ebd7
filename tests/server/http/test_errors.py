"""Tests of invalid bodies: always 400, never 500."""

import json
from typing import Any

import pytest
from ask import CHAT, COMPLETIONS, ask, chat, refused
from fake_engine import FakeEngine

JSON = {"content-type": "application/json"}
HI = '{"messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": 3}',
        b'{"messages": []}',
        b'{"messages": [{"role": 1}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": true}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1.5}',
        b'{"messages": [{"role": "user", "content": "a"}], "stream": 2}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "seed": 9223372036854775808}',
        b'{"messages": [{"role": "user", "content": "a"}], "cache_salt": ""}',
        b'{"messages": [{"role": "user", "content": "a"}], "documents": '
        + b"[" * 100000
        + b"]" * 100000
        + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "stop": "\\udfff"}',
        (HI + ', "request_id": "\ud800"}').encode("utf-16-le", "surrogatepass"),
        (HI + ', "stop": "\ud800"}').encode("utf-32", "surrogatepass"),
    ],
)
def test_malformed_bodies_are_400(content: bytes) -> None:
    engine = FakeEngine()
    refused(ask("POST", CHAT, engine=engine, content=content, headers=JSON))
    assert engine.seen == []


def test_validation_error_names_field_and_kind() -> None:
    error = refused(ask("POST", CHAT, json={"messages": 3}))
    assert error["type"] == "Bad Request" and error["param"] == "body.messages"
    assert error["message"].startswith("1 validation error:\n  {") and "list_type" in error["message"]
    error = refused(ask("POST", CHAT, json={"messages": [{"role": "u"}], "truncate_prompt_tokens": -2}))
    assert "greater_than_equal" in error["message"]


def test_long_list_of_errors_is_truncated() -> None:
    names = "n seed top_k top_p min_p stream echo user model min_tokens"
    error = refused(ask("POST", COMPLETIONS, json=dict.fromkeys(names.split(), []) | {"prompt": "a"}))
    assert "and 2 more" in error["message"] and len(error["message"]) < 2000


MANY = [1] * 1000
TURN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MANY}),
        (CHAT, {"messages": [TURN], "tools": MANY}),
        (CHAT, {"messages": [TURN | {"tool_calls": MANY}]}),
        (CHAT, {"messages": [TURN], "bad_words": MANY}),
        (CHAT + "/batch", {"messages": [[TURN, *MANY]]}),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": ["x"] * 1000}),
        ("/detokenize", {"tokens": ["x"] * 1000}),
        ("/v1/responses", {"input": "a", "tools": MANY}),
        ("/v1/responses", {"input": "a", "metadata": dict.fromkeys(map(str, range(1000)), 1)}),
        ("/v1/messages", {"max_tokens": 1, "messages": MANY}),
        ("/v1/messages", {"max_tokens": 1, "messages": [TURN], "tools": MANY}),
        ("/v1/messages", {"max_tokens": 1, "messages": [TURN], "stop_sequences": MANY}),
    ],
)
def test_one_of_many_invalid_items_is_reported(path: str, body: dict[str, Any]) -> None:
    """An error takes far more memory than the invalid item."""
    response = ask("POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("1 validation error:")


def test_one_of_many_invalid_biases_is_reported() -> None:
    error = refused(chat(logit_bias=dict.fromkeys(map(str, range(1000)), "x")))
    assert error["param"] == "logit_bias" and "must be a number" in error["message"]


def test_escaped_emoji_and_nul_are_accepted() -> None:
    """The surrogate check must not refuse an escaped emoji."""
    raw = json.dumps({"messages": [{"role": "user", "content": "\U0001f642\0"}]}).encode()
    assert b"\\ud83d" in raw
    assert ask("POST", CHAT, content=raw, headers=JSON).status_code == 200


def test_internal_error_is_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine, "_step", lambda *_: 1 / 0)
    error = refused(chat(engine), 500)
    assert error["type"] == "InternalServerError" and "division" not in error["message"]
    assert engine.num_in_flight == 0


def test_dead_engine_is_503_before_the_stream_starts() -> None:
    engine = FakeEngine()
    engine.dead = "the engine process died"
    assert refused(chat(engine), 503)["message"] == "the engine process died"
    assert refused(chat(engine, stream=True), 503)["type"] == "ServiceUnavailableError"
