"""Tests of prompts: chat templates, truncation, special tokens."""

import json
import threading
from typing import Any

import pytest
from ask import chat, complete, refused
from fake_engine import FakeEngine

from quire.frontend.chat import chat_prompt
from quire.frontend.inputs import Prompt

CALL = {"function": {"name": "f", "arguments": json.dumps({"x": "y" * 20_000})}}


def prompt_of(settings: dict[str, Any] | None = None, **body: Any) -> str:
    engine = FakeEngine()
    assert chat(engine, settings=settings, **body).status_code == 200
    return engine.seen[0][1].text or ""


def test_request_template_kwargs_override_the_defaults() -> None:
    settings = {"default_chat_template_kwargs": {"mood": "calm"}}
    assert "mood:calm" in prompt_of(settings)
    assert "mood:wild" in prompt_of(settings, chat_template_kwargs={"mood": "wild"})
    assert "docs:1" in prompt_of(documents=[{"text": "x"}])


def test_tools_are_in_the_prompt_unless_excluded() -> None:
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
    }
    assert "tools:1" in prompt_of(**fields)
    assert "tools" not in prompt_of({"exclude_tools_when_tool_choice_none": True}, **fields)


def test_trusted_request_may_set_the_template() -> None:
    assert (
        prompt_of({"trust_request_chat_template": True}, chat_template="T:{{ messages[0].content }}")
        == "T:hi"
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user:a\nb" in prompt_of(messages=[{"role": "user", "content": parts}])
    assert "user:a\nb" in prompt_of(messages=[{"role": "user", "content": ["a", parts[1]]}])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"truncate_prompt_tokens": 2}, "ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": 9}, "abcdef"),
    ],
)
def test_truncation_side(body: dict[str, Any], expected: str) -> None:
    engine = FakeEngine()
    assert (
        complete(engine, prompt="abcdef", echo=True, max_tokens=1, **body).json()["choices"][0]["text"]
        == expected + "H"
    )


def test_truncate_minus_one_keeps_what_fits() -> None:
    engine = FakeEngine(max_model_len=32)
    assert complete(engine, prompt="x" * 100, max_tokens=10, truncate_prompt_tokens=-1).status_code == 200
    assert len(engine.seen[0][1].token_ids) == 22
    assert (
        chat(engine, messages=[{"role": "user", "content": "x" * 100}], truncate_prompt_tokens=-1).status_code
        == 200
    )
    assert refused(complete(engine, truncate_prompt_tokens=33))["param"] == "truncate_prompt_tokens"
    assert (
        refused(complete(engine, truncate_prompt_tokens=0))["message"] == "The decoder prompt cannot be empty"
    )


def test_too_long_prompt_is_refused_with_the_lengths() -> None:
    error = refused(complete(FakeEngine(max_model_len=32), prompt="x" * 40))
    assert "maximum context length is 32 tokens" in error["message"] and "40" in error["message"]


def test_long_prompt_is_tokenized_off_the_event_loop() -> None:
    """The path through a thread must give the same tokens."""
    engine = FakeEngine(max_model_len=50_000)
    complete(engine, prompt="ab" * 10_000)
    assert engine.seen[0][1].token_ids == [64, 65] * 10_000


@pytest.mark.parametrize(
    "large",
    [
        {"tools": [{"function": {"name": "f"}, "x": "y" * 20_000}], "tool_choice": "none"},
        {"documents": [{"text": "y" * 20_000}]},
        {"chat_template_kwargs": {"mood": ["y" * 20_000]}},
        {"chat_template_kwargs": {"mood": {"k": list(range(20_000))}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "y" * 20_000}]}]},
        {"messages": [{"role": "user", "content": "a", "reasoning": "y" * 20_000}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
        {"chat_template": "{{ messages[0].content }}"},
    ],
)
def test_large_inputs_are_rendered_off_the_event_loop(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools, documents and template variables block the loop as long messages do."""
    threads: list[bool] = []

    def rendering(*args: Any, **kwargs: Any) -> Prompt:
        threads.append(threading.current_thread() is threading.main_thread())
        return chat_prompt(*args, **kwargs)

    monkeypatch.setattr("quire.server.openai.prompts.chat_prompt", rendering)
    trusted = {"trust_request_chat_template": True}
    assert chat(FakeEngine(max_model_len=10**6), settings=trusted, **large).status_code == 200
    assert chat().status_code == 200
    assert threads == [False, True]
