"""Tests of /v1/messages: the request that reaches the engine, and the answer, complete and streamed."""

import json
import threading
from typing import Any

import httpx
import pytest
from ask import ask
from fake_engine import ANSWER, FakeEngine
from jsonschema import Draft202012Validator

from quire.data.request import Request
from quire.data.step_plan import FinishReason, StepOutput
from quire.server.anthropic import routes
from quire.server.anthropic.bodies import CountBody, MessageBody, ThinkingBlock
from quire.server.anthropic.translate import as_chat, join_turns

PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}


def send(
    engine: FakeEngine | None = None, settings: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    fields = {"model": "fake", "max_tokens": 100, "messages": [USER], **body}
    return ask("POST", PATH, engine=engine, settings=settings, json=fields)


def complete_message(engine: FakeEngine | None = None, **body: Any) -> dict[str, Any]:
    response = send(engine, **body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    parsed_events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        parsed_events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + parsed_events[-1]["type"]
    return parsed_events


def fold_events(stream_events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client assembles from the events, which must be in order."""
    message: dict[str, Any] = stream_events[0]["message"]
    open_index, raw = None, ""
    for event in stream_events[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert open_index is None and index == len(message["content"])
                message["content"].append(block)
                open_index, raw = index, ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == open_index
                (name,) = delta.keys() - {"type"}
                if name == "partial_json":
                    raw += delta[name]
                else:
                    message["content"][index][name] += delta[name]
            case {"type": "content_block_stop", "index": index}:
                assert index == open_index
                open_index = None
                if raw:
                    message["content"][index]["input"] = json.loads(raw)
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    assert [event["type"] for event in stream_events[-2:]] == ["message_delta", "message_stop"]
    return message


def refused(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind, body
    message: str = body["error"]["message"]
    return message


def prompt_of(**body: Any) -> str | None:
    engine = FakeEngine()
    complete_message(engine, **body)
    return engine.seen[0][1].text


# ---- answers


def test_complete_answer() -> None:
    message = complete_message(temperature=0.5, top_k=7)
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("user:hi\nassistant:"),
            "output_tokens": len(ANSWER.encode()) + 1,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }


@pytest.mark.parametrize("answer_text", [ANSWER, ""])
def test_stream_equals_the_complete_answer(answer_text: str) -> None:
    streamed = fold_events(events(send(FakeEngine(answer_text), stream=True)))
    message = complete_message(FakeEngine(answer_text))
    assert streamed | {"id": ""} == message | {"id": ""}
    assert message["content"] == [{"type": "text", "text": answer_text}]


def test_cached_tokens_are_reported_if_enabled() -> None:
    usage = send(settings={"enable_prompt_tokens_details": True}).json()["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] == len("user:hi\nassistant:") - 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(stream: bool) -> None:
    def ending(**body: Any) -> tuple[str, str | None]:
        response = send(stream=stream, **body)
        message = fold_events(events(response)) if stream else response.json()
        return message["stop_reason"], message["stop_sequence"]

    assert ending() == ("end_turn", None)
    assert ending(max_tokens=3) == ("max_tokens", None)
    assert ending(stop_sequences=["world", "x"]) == ("stop_sequence", "world")
    assert ending(stop_sequences=[*"123456", "world"]) == ("stop_sequence", "world")


class Ending(FakeEngine):
    """Engine that ends its answers after three tokens."""

    def __init__(self, finish: FinishReason) -> None:
        super().__init__()
        self.finish = finish

    def _step(self, requests: list[Request], position: int) -> StepOutput:
        step = super()._step(requests, position)
        step.finished |= {request.id: self.finish for request in requests if position == 2}
        return step


def test_repetition_stop_is_max_tokens() -> None:
    circles = FinishReason("repetition", "repetition_detected")
    for message in (
        complete_message(Ending(circles)),
        fold_events(events(send(Ending(circles), stream=True))),
    ):
        assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_aborted_answer_is_an_error(reason: str) -> None:
    refused(send(Ending(FinishReason(reason))), 500, "api_error")
    stream_events = events(send(Ending(FinishReason(reason)), stream=True))
    assert stream_events[0]["type"] == "message_start" and stream_events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in [event["type"] for event in stream_events]


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "run")]
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def parse_both(text: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the complete answer and the one assembled from a stream, after comparing them."""
    fields = {"settings": PARSERS, "tools": TOOLS, "max_tokens": 400, **body}
    both = (
        send(FakeEngine(text), **fields).json(),
        fold_events(events(send(FakeEngine(text), stream=True, **fields))),
    )
    for message in both:
        message["id"] = ""
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
    return both


THOUGHT_AND_CALLS = (
    "<think>Hm, so.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "Żółw"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
)


def test_thinking_and_tool_calls_are_blocks() -> None:
    message, streamed = parse_both(THOUGHT_AND_CALLS)
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and message["stop_reason"] == "tool_use"
    thinking, _, look, run = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm, so.", "signature": ""}
    assert (look["name"], look["input"], run["name"], run["input"]) == ("look", {"at": "Żółw"}, "run", {})
    assert streamed == message


def test_parallel_tools_and_thinking_can_be_disabled() -> None:
    choice, thinking = (
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "adaptive", "display": "omitted"},
    )
    for message in parse_both(THOUGHT_AND_CALLS, tool_choice=choice, thinking=thinking):
        assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


def test_forced_tool_call() -> None:
    for message in parse_both(
        '{"at": "a"}', tool_choice={"type": "tool", "name": "look"}, thinking={"type": "disabled"}
    ):
        (call,) = message["content"]
        assert (call["name"], call["input"], message["stop_reason"]) == ("look", {"at": "a"}, "tool_use")


def test_whitespace_between_blocks_is_dropped() -> None:
    text = '<think>x</think>\n\n<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    for message in parse_both(text):
        assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]


def test_truncated_tool_call_has_an_empty_input() -> None:
    fields = {"settings": PARSERS, "tools": TOOLS, "max_tokens": THOUGHT_AND_CALLS.index("Ż")}
    message = send(FakeEngine(THOUGHT_AND_CALLS), **fields).json()
    assert message["content"][-1]["input"] == {} and message["stop_reason"] == "max_tokens"


def test_tool_input_with_surrogates_or_deep_nesting() -> None:
    must = {"tool_choice": {"type": "tool", "name": "look"}, "thinking": {"type": "disabled"}}
    (call,) = parse_both(r'{"\ude00": ["a\ud83db", "\ud83d\ude00"]}', **must)[0]["content"]
    assert call["input"] == {"\ufffd": ["a\ufffdb", "\U0001f600"]}
    deep = FakeEngine('{"a":' + "[" * 1500 + "]" * 1500 + "}", max_model_len=4_000)
    response = send(deep, PARSERS, tools=TOOLS, max_tokens=3_900, **must)
    assert response.status_code == 200
    assert response.json()["content"][0]["input"].keys() <= {"a"}  # Python 3.12 reads it.


# ---- the request that reaches the engine


def test_conversation_with_tools_equals_the_chat_request() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "ż"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "bad", "is_error": True},
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "user", "content": "c"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m.tool_call_id }}|"
        "{{ m.is_error }}|{% for t in m.tool_calls or [] %}{{ t.function.name }}{{ t.function.arguments.at }}"
        "{% endfor %}{{ '\\n' }}{% endfor %}{{ tools }}|{{ enable_thinking }}"
    )
    engine = FakeEngine(max_model_len=1000)
    engine.facts.chat_template = template
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    fields = {
        "system": [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}],
        "messages": messages,
        "tools": [tool],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
    }
    complete_message(engine, **fields)
    assert (engine.seen[0][1].text or "").splitlines() == [
        "system|s1",
        "s2||||",
        "user|a||||",
        "assistant||t|||lookż",
        "tool|r||c1||",
        "tool|bad||c2|True|",
        "user|b",
        "c||||",
        "[{'type': 'function', 'function': {'name': 'look', 'description': 'd', 'parameters': "
        "{'type': 'object'}}}]|False",
    ]
    fields |= {"max_tokens": 10**30, "temperature": "none of its business"}
    counted = ask("POST", PATH + "/count_tokens", engine=engine, json=fields).json()
    assert counted == {"input_tokens": len(engine.seen[0][1].token_ids)}


class Unglued(str):
    """String that must not be concatenated."""

    def __add__(self, other: str) -> str:
        raise AssertionError

    __radd__ = __add__


def test_consecutive_turns_are_joined_without_copies() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "a"}
    next_message = {"role": "assistant", "content": "b", "reasoning": ["t"], "tool_calls": [{}]}
    join_turns(message, next_message)
    before = dict(message)
    join_turns(message, next_message)
    assert all(message[name] is value for name, value in before.items())
    assert [part["text"] for part in message["content"]] == ["a", "b", "b"]
    assert (message["reasoning"], message["tool_calls"]) == (["t", "t"], [{}, {}])

    blocks = [ThinkingBlock(type="thinking", thinking=text) for text in "abc"]
    for block in blocks:
        block.thinking = Unglued(block.thinking)
    turns = [MessageBody.model_construct(role="assistant", content=[*blocks]) for _ in range(2)]
    body = CountBody(messages=[MessageBody(role="user", content="x")])
    body.messages += turns
    assert as_chat(body, budgets=False).messages[1].model_extra == {"reasoning": "abcabc"}


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
def test_long_bodies_are_translated_off_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = []

    def record_thread(*args: Any, **kwargs: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return as_chat(*args, **kwargs)

    monkeypatch.setattr(routes, "as_chat", record_thread)
    for length in (1, 20_000):
        turn = {"role": "user", "content": "x" * length}
        body = {"max_tokens": 1, "messages": [turn]}
        assert ask("POST", path, engine=FakeEngine(max_model_len=30_000), json=body).status_code == 200
    assert on_loop == [True, False]


def test_final_assistant_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    assert prompt_of(messages=[USER, begun]) == "user:hi\nassistant:The answer is ("
    assert prompt_of(messages=[USER]) == "user:hi\nassistant:"


def test_json_schema_becomes_a_constraint() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        engine = FakeEngine("{}")
        complete_message(engine, **body)
        constraint = engine.seen[0][2].structured_outputs
        assert constraint is not None and json.loads(constraint.json) == schema


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    complete_message(engine, temperature=0.3, top_p=0.9, top_k=5, seed=7, min_p=0.1, max_tokens=9, priority=4)
    _, _, params, priority = engine.seen[0]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.9, 5, 7)
    assert (params.min_p, params.max_tokens, priority) == (0.1, 9, 4)


def test_thinking_budget_needs_a_reasoning_parser() -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    for settings, budget in ((PARSERS, 20), ({}, None)):
        engine = FakeEngine()
        assert send(engine, settings, thinking=thinking).status_code == 200
        assert engine.seen[0][2].thinking_token_budget == budget


# ---- errors


def test_errors_have_the_anthropic_format() -> None:
    assert "max_tokens" in refused(send(max_tokens=0))
    assert "max_tokens" in refused(send(max_tokens=None))
    refused(send(messages=[]))
    refused(send(temperature=3.0))
    refused(send(seed=2**64))
    refused(send(messages=[{"role": "bot", "content": "x"}]))
    refused(send(model="other"), 404, "not_found_error")
    refused(ask("POST", PATH, content=b"{", headers={"content-type": "application/json"}))
    refused(ask("GET", PATH), 405)
    unknown = {"messages": [USER], "model": "x"}
    refused(ask("POST", PATH + "/count_tokens", json=unknown), 404, "not_found_error")
    refused(send(FakeEngine(fail_after=2)), 500, "api_error")
    dead = FakeEngine()
    dead.dead = "gone"
    refused(send(dead), 503, "overloaded_error")


@pytest.mark.parametrize("kind", ["audio", "document", "server_tool_use", ""])
def test_unsupported_blocks_are_refused(kind: str) -> None:
    block = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    assert repr(kind) in refused(send(messages=[{"role": "user", "content": [block]}]))
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    assert repr(kind) in refused(send(messages=[{"role": "user", "content": [result]}]))


def test_server_tools_are_refused() -> None:
    assert "web_search" in refused(send(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    assert "input_schema" in refused(send(tools=[{"name": "a"}]))
    assert "name" in refused(send(tools=[{"name": "a", "input_schema": {}}], tool_choice={"type": "tool"}))
    assert complete_message(tools=[], tool_choice={"type": "auto"})["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
def test_deeply_nested_schema_is_refused(path: str) -> None:
    """Both where the schema itself is too deep and where the chat request made from it is."""
    schema: dict[str, Any] = {}
    for depth in range(257):
        if depth >= 254:
            tools = [{"name": "f", "input_schema": schema}]
            body = {"max_tokens": 5, "messages": [USER], "tools": tools}
            assert "Recursion" in refused(ask("POST", path, settings=PARSERS, json=body))
        schema = {"a": schema}


def test_failed_stream_ends_with_an_error_event() -> None:
    stream_events = events(send(FakeEngine(fail_after=3), stream=True))
    assert stream_events[0]["type"] == "message_start" and stream_events[-1]["error"]["type"] == "api_error"


def test_api_key_in_x_api_key_header() -> None:
    def status(headers: dict[str, str]) -> httpx.Response:
        body = {"max_tokens": 5, "messages": [USER]}
        return ask("POST", PATH, settings={"api_key": ["k1"]}, headers=headers, json=body)

    for sent in ({"x-api-key": "k1"}, {"authorization": "Bearer k1"}):
        assert status(sent).status_code == 200
    refused(status({"x-api-key": "k2"}), 401, "authentication_error")
    refused(status({}), 401, "authentication_error")


@pytest.mark.parametrize("result, is_right", [("said", True), (3, False)])
def test_openapi_block_schema_is_unambiguous(result: Any, is_right: bool) -> None:
    """A block that matched two alternatives of the schema would be invalid."""
    document = ask("GET", "/openapi.json").json()
    body = {"$ref": "#/components/schemas/MessagesBody", "components": document["components"]}
    block = {"type": "tool_result", "tool_use_id": "a", "content": result}
    sent = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert Draft202012Validator(body).is_valid(sent) == is_right
    assert (send(**sent).status_code == 200) == is_right
