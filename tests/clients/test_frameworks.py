"""Tests of litellm, langchain, instructor and llama-index against one server."""

import json
from typing import Any, Literal

import pytest
from client_cases import MESSAGES, MODEL, NAMED, QUESTION, TOOLS, Place

pytestmark = pytest.mark.slow


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    for provider in ("openai", "hosted_vllm"):
        fields = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "none", "messages": MESSAGES}
        fields |= {"temperature": 0, "timeout": 120}
        whole = litellm.completion(**fields, max_tokens=16)
        assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens > 0
        chunks = litellm.completion(**fields, max_tokens=16, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        called = litellm.completion(**fields, tools=TOOLS, tool_choice=NAMED)
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments).keys() == {"city", "unit"}


@pytest.fixture
def chat(url: str) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, temperature=0, max_tokens=60, timeout=120
    )


def test_langchain_invokes_and_streams(chat: Any) -> None:
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == whole.content
    assert [item.content for item in chat.batch([QUESTION] * 3)] == [whole.content] * 3


def test_langchain_binds_tools(chat: Any) -> None:
    def get_weather(city: Literal["Paris", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
        """The weather of a city."""
        return f"{city}: 21 {unit}"

    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather" and call["args"].keys() == {"city", "unit"}
    merged: Any = None
    for chunk in bound.stream(QUESTION):
        merged = chunk if merged is None else merged + chunk
    assert [tool_call["args"] for tool_call in merged.tool_calls] == [call["args"]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Place, method=method).invoke(QUESTION), Place)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    inner = openai.OpenAI(base_url=url, api_key="none", timeout=120)
    client = instructor.from_openai(inner, mode=instructor.Mode[mode])
    place = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Place, max_retries=0, temperature=0, max_tokens=100
    )
    assert isinstance(place, Place)


def test_llama_index(url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    shared = {"model": MODEL, "api_base": url, "api_key": "none", "temperature": 0, "timeout": 120}
    llm = like.OpenAILike(**shared, is_chat_model=True, max_tokens=16)
    request = [ChatMessage(role="user", content=QUESTION)]
    whole = llm.chat(request)
    assert "Paris" in whole.message.content
    assert "".join(chunk.delta for chunk in llm.stream_chat(request)) == whole.message.content
    plain = like.OpenAILike(**shared, is_chat_model=False, max_tokens=5)
    assert "Paris" in plain.complete("The capital of France is").text
