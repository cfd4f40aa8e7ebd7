"""Tests of the openai client: chat, completions, responses, parsed answers, tools and stream helpers."""

import json
from typing import Any

import pytest
from client_cases import MESSAGES, MODEL, NAMED, QUESTION, TOOLS, WEATHER, Place

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0)


def test_streamed_chat_equals_the_complete_one(client: Any) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 16}
    whole = client.chat.completions.create(**fields)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions_with_logprobs(client: Any) -> None:
    fields = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 5}
    whole = client.completions.create(**fields, logprobs=2)
    assert "Paris" in whole.choices[0].text
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
    assert all(len(best) >= 2 for best in whole.choices[0].logprobs.top_logprobs)
    streamed = "".join(item.choices[0].text for item in client.completions.create(**fields, stream=True))
    assert streamed == whole.choices[0].text


def test_models_and_errors(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="a generating model has no embeddings")


def test_parse_returns_the_requested_class(client: Any) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "response_format": Place, "temperature": 0}
    for chat in (client.chat, client.beta.chat):
        parsed = chat.completions.parse(**fields, max_completion_tokens=100)
        assert isinstance(parsed.choices[0].message.parsed, Place)


def test_stream_helper_parses(client: Any) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "response_format": Place, "temperature": 0}
    with client.chat.completions.stream(**fields, max_completion_tokens=100) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert isinstance(final.choices[0].message.parsed, Place)


def test_named_tool_is_called(client: Any) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    pieces = [
        delta
        for chunk in client.chat.completions.create(**fields, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments


def test_required_tool_round_trip(client: Any) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=200
    )
    calls = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls" and calls
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in calls]
    messages = [*MESSAGES, first.choices[0].message.to_dict(), *answers]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=20
    )
    assert second.choices[0].message.content and not second.choices[0].message.tool_calls


def test_responses_complete_streamed_and_continued(client: Any) -> None:
    fields = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**fields)
    assert whole.status in ("completed", "incomplete") and "Paris" in whole.output_text
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    assert final.output_text == whole.output_text
    more = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=whole.id, max_output_tokens=16
    )
    assert more.previous_response_id == whole.id
    assert more.usage.input_tokens > whole.usage.input_tokens


def test_responses_parsed_and_with_tools(client: Any) -> None:
    typed = client.responses.parse(model=MODEL, input="A city?", text_format=Place, max_output_tokens=100)
    assert isinstance(typed.output_parsed, Place)
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    called = client.responses.create(
        model=MODEL, input="Weather?", tools=[tool], tool_choice={"type": "function", "name": "get_weather"}
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments).keys() == {"city", "unit"}
