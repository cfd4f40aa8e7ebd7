"""/v1/messages: what goes to the engine, and what comes back, whole and as events."""

import json
import threading
from typing import Any

import httpx
import pytest
from ask import ask
from fake_engine import ANSWER, FakeEngine
from jsonschema import Draft202012Validator

from quire.data.plan import FinishReason, StepOutput
from quire.data.request import Request
from quire.server.anthropic import routes
from quire.server.anthropic.bodies import CountBody, MessageBody, ThinkingBlock
from quire.server.anthropic.translate import as_chat, join_turns

PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}


def send(
    engine: FakeEngine | None = None, settings: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    given = {"model": "fake", "max_tokens": 100, "messages": [USER], **body}
    return ask("POST", PATH, engine=engine, settings=settings, json=given)


def whole(engine: FakeEngine | None = None, **body: Any) -> dict[str, Any]:
    response = send(engine, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def folded(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events, which must be in order."""
    message: dict[str, Any] = found[0]["message"]
    open_index, raw = None, ""
    for each in found[1:]:
        match each:
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
    assert [each["type"] for each in found[-2:]] == ["message_delta", "message_stop"]
    return message


def refused(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind, body
    message: str = body["error"]["message"]
    return message


def prompt_of(**body: Any) -> str | None:
    engine = FakeEngine()
    whole(engine, **body)
    return engine.seen[0][1].text


# ---- answers


def test_a_whole_answer() -> None:
    found = whole(temperature=0.5, top_k=7)
    assert found.pop("id").startswith("msg_")
    assert found == {
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
def test_a_stream_says_what_the_whole_answer_does(answer_text: str) -> None:
    streamed = folded(events(send(FakeEngine(answer_text), stream=True)))
    found = whole(FakeEngine(answer_text))
    assert streamed | {"id": ""} == found | {"id": ""}
    assert found["content"] == [{"type": "text", "text": answer_text}]


def test_cached_tokens_are_told_apart_where_that_is_set() -> None:
    usage = send(settings={"enable_prompt_tokens_details": True}).json()["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] == len("user:hi\nassistant:") - 3


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(stream: bool) -> None:
    def ending(**body: Any) -> tuple[str, str | None]:
        response = send(stream=stream, **body)
        found = folded(events(response)) if stream else response.json()
        return found["stop_reason"], found["stop_sequence"]

    assert ending() == ("end_turn", None)
    assert ending(max_tokens=3) == ("max_tokens", None)
    assert ending(stop_sequences=["world", "x"]) == ("stop_sequence", "world")
    assert ending(stop_sequences=[*"123456", "world"]) == ("stop_sequence", "world")


class Ending(FakeEngine):
    """Ends its answers after three tokens."""

    def __init__(self, finish: FinishReason) -> None:
        super().__init__()
        self.finish = finish

    def _step(self, requests: list[Request], position: int) -> StepOutput:
        step = super()._step(requests, position)
        step.finished |= {request.id: self.finish for request in requests if position == 2}
        return step


def test_an_answer_that_went_round_in_circles_was_cut() -> None:
    circles = FinishReason("repetition", "repetition_detected")
    for found in (whole(Ending(circles)), folded(events(send(Ending(circles), stream=True)))):
        assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_broken_off_is_an_error(reason: str) -> None:
    refused(send(Ending(FinishReason(reason))), 500, "api_error")
    found = events(send(Ending(FinishReason(reason)), stream=True))
    assert found[0]["type"] == "message_start" and found[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in [each["type"] for each in found]


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "run")]
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def parsed(text: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole answer, and what a stream adds up to."""
    given = {"settings": PARSERS, "tools": TOOLS, "max_tokens": 400, **body}
    both = (
        send(FakeEngine(text), **given).json(),
        folded(events(send(FakeEngine(text), stream=True, **given))),
    )
    for each in both:
        each["id"] = ""
        for block in each["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
    return both


SAID = (
    "<think>Hm, so.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "Żółw"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
)


def test_thoughts_and_tools_are_blocks() -> None:
    found, streamed = parsed(SAID)
    kinds = [block["type"] for block in found["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and found["stop_reason"] == "tool_use"
    thinking, _, look, run = found["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm, so.", "signature": ""}
    assert (look["name"], look["input"], run["name"], run["input"]) == ("look", {"at": "Żółw"}, "run", {})
    assert streamed == found


def test_one_call_and_no_thoughts_where_that_is_asked() -> None:
    choice, thinking = (
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "adaptive", "display": "omitted"},
    )
    for found in parsed(SAID, tool_choice=choice, thinking=thinking):
        assert [block["type"] for block in found["content"]] == ["text", "tool_use"]


def test_a_tool_that_must_be_called() -> None:
    for found in parsed(
        '{"at": "a"}', tool_choice={"type": "tool", "name": "look"}, thinking={"type": "disabled"}
    ):
        (call,) = found["content"]
        assert (call["name"], call["input"], found["stop_reason"]) == ("look", {"at": "a"}, "tool_use")


def test_space_between_blocks_is_no_block() -> None:
    text = '<think>x</think>\n\n<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    for found in parsed(text):
        assert [block["type"] for block in found["content"]] == ["thinking", "tool_use"]


def test_a_call_that_breaks_off_has_an_object_still() -> None:
    given = {"settings": PARSERS, "tools": TOOLS, "max_tokens": SAID.index("Ż")}
    found = send(FakeEngine(SAID), **given).json()
    assert found["content"][-1]["input"] == {} and found["stop_reason"] == "max_tokens"


def test_an_input_that_is_no_text_or_too_deep_is_answered_still() -> None:
    must = {"tool_choice": {"type": "tool", "name": "look"}, "thinking": {"type": "disabled"}}
    (call,) = parsed(r'{"\ude00": ["a\ud83db", "\ud83d\ude00"]}', **must)[0]["content"]
    assert call["input"] == {"\ufffd": ["a\ufffdb", "\U0001f600"]}
    deep = FakeEngine('{"a":' + "[" * 1500 + "]" * 1500 + "}", max_model_len=4_000)
    found = send(deep, PARSERS, tools=TOOLS, max_tokens=3_900, **must)
    assert found.status_code == 200
    assert found.json()["content"][0]["input"].keys() <= {"a"}  # Python 3.12 reads it.


# ---- what the engine is asked


def test_a_conversation_with_tools_is_the_one_that_chat_knows() -> None:
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
    given = {
        "system": [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}],
        "messages": messages,
        "tools": [tool],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
    }
    whole(engine, **given)
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
    given |= {"max_tokens": 10**30, "temperature": "none of its business"}
    counted = ask("POST", PATH + "/count_tokens", engine=engine, json=given).json()
    assert counted == {"input_tokens": len(engine.seen[0][1].token_ids)}


class Unglued(str):
    """A text that is not copied into another with every step."""

    def __add__(self, other: str) -> str:
        raise AssertionError

    __radd__ = __add__


def test_turns_in_a_row_are_not_copied_for_each_that_follows() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "a"}
    more = {"role": "assistant", "content": "b", "reasoning": ["t"], "tool_calls": [{}]}
    join_turns(message, more)
    before = dict(message)
    join_turns(message, more)
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
def test_long_bodies_are_translated_off_the_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return as_chat(*args, **kwargs)

    monkeypatch.setattr(routes, "as_chat", noted)
    for length in (1, 20_000):
        turn = {"role": "user", "content": "x" * length}
        body = {"max_tokens": 1, "messages": [turn]}
        assert ask("POST", path, engine=FakeEngine(max_model_len=30_000), json=body).status_code == 200
    assert on_loop == [True, False]


def test_a_last_turn_of_the_assistant_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    assert prompt_of(messages=[USER, begun]) == "user:hi\nassistant:The answer is ("
    assert prompt_of(messages=[USER]) == "user:hi\nassistant:"


def test_a_schema_becomes_a_constraint() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        engine = FakeEngine("{}")
        whole(engine, **body)
        asked = engine.seen[0][2].structured_outputs
        assert asked is not None and json.loads(asked.json) == schema


def test_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    whole(engine, temperature=0.3, top_p=0.9, top_k=5, seed=7, min_p=0.1, max_tokens=9, priority=4)
    _, _, params, priority = engine.seen[0]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.9, 5, 7)
    assert (params.min_p, params.max_tokens, priority) == (0.1, 9, 4)


def test_thoughts_have_a_budget_where_they_can_be_told() -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    for settings, budget in ((PARSERS, 20), ({}, None)):
        engine = FakeEngine()
        assert send(engine, settings, thinking=thinking).status_code == 200
        assert engine.seen[0][2].thinking_token_budget == budget


# ---- errors


def test_errors_have_this_apis_words() -> None:
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
def test_blocks_that_cannot_be_read_are_refused(kind: str) -> None:
    block = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    assert repr(kind) in refused(send(messages=[{"role": "user", "content": [block]}]))
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    assert repr(kind) in refused(send(messages=[{"role": "user", "content": [result]}]))


def test_tools_of_the_server_are_refused() -> None:
    assert "web_search" in refused(send(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    assert "input_schema" in refused(send(tools=[{"name": "a"}]))
    assert "name" in refused(send(tools=[{"name": "a", "input_schema": {}}], tool_choice={"type": "tool"}))
    assert whole(tools=[], tool_choice={"type": "auto"})["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
def test_a_schema_that_is_too_deep_is_refused(path: str) -> None:
    """Here, and where only the conversation that is made of it is."""
    schema: dict[str, Any] = {}
    for depth in range(257):
        if depth >= 254:
            tools = [{"name": "f", "input_schema": schema}]
            body = {"max_tokens": 5, "messages": [USER], "tools": tools}
            assert "Recursion" in refused(ask("POST", path, settings=PARSERS, json=body))
        schema = {"a": schema}


def test_a_stream_that_fails_ends_in_an_error() -> None:
    found = events(send(FakeEngine(fail_after=3), stream=True))
    assert found[0]["type"] == "message_start" and found[-1]["error"]["type"] == "api_error"


def test_the_key_may_be_sent_as_this_api_sends_it() -> None:
    def status(headers: dict[str, str]) -> httpx.Response:
        body = {"max_tokens": 5, "messages": [USER]}
        return ask("POST", PATH, settings={"api_key": ["k1"]}, headers=headers, json=body)

    for sent in ({"x-api-key": "k1"}, {"authorization": "Bearer k1"}):
        assert status(sent).status_code == 200
    refused(status({"x-api-key": "k2"}), 401, "authentication_error")
    refused(status({}), 401, "authentication_error")


@pytest.mark.parametrize("result, is_right", [("said", True), (3, False)])
def test_a_block_is_described_once(result: Any, is_right: bool) -> None:
    """A description that fits two kinds of blocks fits none: one of several must."""
    document = ask("GET", "/openapi.json").json()
    body = {"$ref": "#/components/schemas/MessagesBody", "components": document["components"]}
    block = {"type": "tool_result", "tool_use_id": "a", "content": result}
    sent = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert Draft202012Validator(body).is_valid(sent) == is_right
    assert (send(**sent).status_code == 200) == is_right
