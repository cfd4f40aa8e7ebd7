"""Tests of cache hints: fields and headers of each API, invalid ones, and the reported tokens."""

from typing import Any

import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask, chat, complete, refused
from fake_engine import FakeEngine

from quire.data.cache_hints import CacheHints

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "ab"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}},
}
OPENAI = (CHAT, COMPLETIONS, "/v1/responses")


def hints_of(path: str, headers: dict[str, str] | None = None, **fields: Any) -> CacheHints | None:
    """Send a request and return the hints that reach the engine."""
    engine = FakeEngine()
    answer = ask("POST", path, engine=engine, json=BODIES[path] | fields, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return engine.seen[0][1].hints


@pytest.mark.parametrize("path", BODIES)
def test_request_without_hints_has_none(path: str) -> None:
    assert hints_of(path) is None


@pytest.mark.parametrize("path", BODIES)
def test_session_header_names_the_session(path: str) -> None:
    assert hints_of(path, {"X-Session-ID": "conversation 1"}) == CacheHints(600, "conversation 1")


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"session_id": "a"}, CacheHints(600, "a")),
        ({"vllm_xargs": {"session_id": "a"}}, CacheHints(600, "a")),
        ({"session_id": "a", "vllm_xargs": {"session_id": "b"}}, CacheHints(600, "a")),
        ({"prompt_cache_key": "k"}, CacheHints(600, "k")),
        ({"session_id": "a", "prompt_cache_key": "k"}, CacheHints(600, "a")),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, CacheHints(86400, "k")),
        ({"prompt_cache_retention": "in_memory"}, CacheHints(600)),
        ({"prompt_cache_retention": "in-memory"}, CacheHints(600)),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, CacheHints(3600)),
        ({"cache_control": {"type": "ephemeral", "ttl": None}}, CacheHints(300)),
    ],
)
def test_fields_of_openai(path: str, fields: dict[str, Any], expected: CacheHints) -> None:
    assert hints_of(path, **fields) == expected


def test_field_takes_precedence_over_the_header() -> None:
    assert hints_of(CHAT, {"X-Session-ID": "header"}, session_id="body") == CacheHints(600, "body")


def test_cache_control_of_chat_parts() -> None:
    def messages(*controls: Any) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "a", "cache_control": control} for control in controls]
        return [{"role": "user", "content": parts}]

    assert hints_of(CHAT, messages=messages(None)) is None
    assert hints_of(CHAT, messages=messages({"type": "ephemeral"})) == CacheHints(300)
    both = messages({"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"})
    assert hints_of(CHAT, messages=both, session_id="a") == CacheHints(3600, "a")
    for control in ("ephemeral", {"type": "ephemeral", "ttl": "2h"}, {"ttl": "1h"}):
        error = refused(ask("POST", CHAT, json={"messages": messages(control)}))
        assert error["param"] == "messages[0].content[0].cache_control"


_TEXT = {"type": "text", "text": "a"}
_SHORT, _LONG = {"type": "ephemeral", "ttl": None}, {"type": "ephemeral", "ttl": "1h"}
_TOOL = {"name": "f", "input_schema": {"type": "object"}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [_TEXT | {"cache_control": _LONG}]}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"cache_control": _SHORT}, 300),
        ({"system": [_TEXT | {"cache_control": _LONG}]}, 3600),
        ({"messages": [{"role": "user", "content": [_TEXT | {"cache_control": _SHORT}]}]}, 300),
        ({"tools": [_TOOL | {"cache_control": _LONG}], "tool_choice": {"type": "none"}}, 3600),
        ({"messages": [{"role": "user", "content": [_RESULT]}]}, 3600),
        ({"cache_control": _SHORT, "system": [_TEXT | {"cache_control": _LONG}]}, 3600),
    ],
)
def test_cache_control_of_anthropic(fields: dict[str, Any], seconds: int) -> None:
    assert hints_of("/v1/messages", **fields) == CacheHints(seconds)


@pytest.mark.parametrize("field", ["session_id", "vllm_xargs"])
def test_session_of_anthropic(field: str) -> None:
    def fields(session: Any) -> dict[str, Any]:
        return {field: session if field == "session_id" else {"session_id": session}}

    assert hints_of("/v1/messages", **fields("a")) == CacheHints(600, "a")
    for session in (5, "", "a" * 257):
        answer = ask("POST", "/v1/messages", json=BODIES["/v1/messages"] | fields(session))
        assert answer.status_code == 400 and answer.json()["type"] == "error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": 5}, "body.session_id"),
        ({"session_id": "a" * 257}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a\n"}, "session_id"),
        ({"vllm_xargs": {"session_id": 3}}, "session_id"),
        ({"prompt_cache_key": ["k"]}, "body.prompt_cache_key"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
        ({"prompt_cache_retention": "1 year"}, "body.prompt_cache_retention"),
        ({"cache_control": "ephemeral"}, "body.cache_control"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "body.cache_control.ttl"),
    ],
)
@pytest.mark.parametrize("path", OPENAI)
def test_invalid_hints_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    error = refused(ask("POST", path, json=BODIES[path] | fields))
    assert error["param"] == param
    if param == "session_id":
        assert "256" in error["message"] or "string" in error["message"]


def test_longest_session_id_is_accepted() -> None:
    assert hints_of(CHAT, session_id="a" * 256) == CacheHints(600, "a" * 256)


@pytest.mark.parametrize("control", ["ephemeral", {"type": "lasting"}, {"type": "ephemeral", "ttl": 5}])
def test_invalid_cache_control_of_anthropic_is_refused(control: Any) -> None:
    content = [_TEXT | {"cache_control": control}]
    body = BODIES["/v1/messages"] | {"messages": [{"role": "user", "content": content}]}
    answer = ask("POST", "/v1/messages", json=body)
    assert answer.status_code == 400 and "cache_control" in answer.json()["error"]["message"]


def test_request_with_hints_gets_its_cached_tokens() -> None:
    engine = FakeEngine()
    engine.num_created = 4
    usage = chat(engine, session_id="a").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3, "created_cache_tokens": 4}
    assert complete(engine, session_id="a").json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    details = ask("POST", "/v1/responses", engine=engine, json={"input": "hi"}).json()["usage"]
    assert details["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 4}


def test_anthropic_usage_with_cache_control() -> None:
    engine, body = FakeEngine(), BODIES["/v1/messages"]
    engine.num_created = 4
    usage = ask("POST", "/v1/messages", engine=engine, json=body | {"cache_control": _LONG}).json()["usage"]
    assert usage == {
        "input_tokens": len("user:hi\nassistant:") - 3 - 4,
        "output_tokens": 4,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 4,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 4},
    }
    plain = ask("POST", "/v1/messages", engine=engine, json=body).json()["usage"]
    assert (plain["cache_creation_input_tokens"], "cache_creation" in plain) == (0, False)
