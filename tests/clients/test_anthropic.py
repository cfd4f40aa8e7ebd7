"""Tests of the anthropic client: complete and streamed messages, tools, and token counts."""

from typing import Any

import pytest
from client_cases import MESSAGES, MODEL, WEATHER
from serve_process import ServeProcess

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.slow

GREEDY: Any = {"extra_body": {"temperature": 0}}  # newer versions of the client have no such parameter
TOOL: Any = {"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER}


@pytest.fixture
def client(served: ServeProcess) -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key="none", timeout=120, max_retries=0)


def test_streamed_message_equals_the_complete_one(client: Any) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "system": "Be brief.", **GREEDY}
    whole = client.messages.create(**fields)
    assert whole.role == "assistant" and "Paris" in whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.usage.output_tokens > 0
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_tool_round_trip(client: Any) -> None:
    fields = {"model": MODEL, "max_tokens": 200, "tools": [TOOL], **GREEDY}
    choice = {"type": "tool", "name": "get_weather"}
    first = client.messages.create(**fields, messages=MESSAGES, tool_choice=choice)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and use.input.keys() == {"city", "unit"}
    with client.messages.stream(**fields, messages=MESSAGES, tool_choice=choice) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(
        **fields | {"max_tokens": 20}, messages=[*MESSAGES, *turns], tool_choice={"type": "none"}
    )
    assert second.content[0].type == "text"


def test_token_count_equals_usage(client: Any) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    used = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert counted.input_tokens == used.usage.input_tokens
    more = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL])
    assert more.input_tokens > 0


def test_errors_have_the_anthropic_format(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=-1)
    assert refused.value.body["type"] == "error" and refused.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=MESSAGES, max_tokens=1)
