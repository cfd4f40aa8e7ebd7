"""Tests of the limits of request fields, and of unsupported features."""

from typing import Any

import pytest
from ask import MESSAGES, chat, refused
from fake_engine import FakeEngine, FakeFacts

from quire.server.openai import sampling_params
from quire.server.openai.sampling_params import UnknownFields

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": TOOLS}, "tool_choice", '"auto" tool choice requires --enable-auto-tool-choice and'),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "--tool-call-parser to be set"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be 'function'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object with a name"),
        ({"tools": [*TOOLS, {"function": {"name": 3}}]}, "tools", "tools[1].function.name must be"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools", "must be a JSON schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must be none, auto"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "either use constraints for structured outputs or tools, not both",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "no type 'xml'"),
        ({"response_format": {"type": []}}, "response_format", "no type []"),
        ({"response_format": {}}, "response_format", "no type None"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "x"}},
                }
            },
            "structured_outputs",
            "Invalid type",
        ),
        ({"response_format": {"type": "structural_tag"}}, "structured_outputs", "`structures`"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown keys regexp"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs", "send one of them"),
        ({"guided_grammar": 'start: "a" b'}, "structured_outputs", "unknown name"),
        (
            {"thinking_token_budget": 5},
            "thinking_token_budget",
            "needs a chat, and a server with a --reasoning",
        ),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
            "is not a multimodal model",
        ),
        ({"stream": True, "use_beam_search": True}, "stream", "not currently supported with beam search"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs", "greater than max allowed: 20"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "`logprobs` must be set"),
        ({"n": 129}, "n", "at most 128 (--max-n)"),
        ({"n": 2, "temperature": 0}, "n", "must be 1 when using greedy sampling"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 strings, got 5"),
        ({"stop": ""}, "stop", "cannot contain an empty string"),
        ({"temperature": -1}, "temperature", "must be in [0, 2]"),
        ({"max_tokens": 10**30}, "max_tokens", "cannot be greater than max_model_len=512"),
        ({"max_tokens": 500}, "input_tokens", "you requested 500 output tokens and your prompt contains 18"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
        (
            {"logit_bias": {"99999": 1}},
            "logit_bias",
            "token_id(s) [99999] in logit_bias contain out-of-vocab token ids",
        ),
        ({"stop_token_ids": [3, 258]}, "stop_token_ids", "Vocabulary size: 258"),
        ({"stop_token_ids": list(range(4097))}, "stop_token_ids", "at most 4096 different ids; send fewer"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs", "put a single choice in a list"),
        ({"guided_choice": "yes"}, "structured_outputs", "put a single choice in a list"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content is null"),
        ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template is not set"),
        ({"continue_final_message": True}, None, "Cannot set both `continue_final_message`"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "may not contain messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "may not contain self"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_field_is_400_and_named(
    body: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    engine = FakeEngine()
    error = refused(chat(engine, **{"stream": stream, **body}))
    assert error["param"] == param and words in error["message"] and error["type"] == "BadRequestError"
    assert engine.seen == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "does not match any of the specified `tools`: 'g'; there are f",
        ),
        ({"tools": []}, "tools", "`tools` must not be an empty array"),
        ({"tool_choice": "auto"}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
        ({"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' field must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "with a `name` and a `schema`",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "only be defined when `stream=True`.",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not available when `stream=True`."),
        ({"top_logprobs": 2}, "top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true."),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "must be a positive value or -1"),
    ],
)
def test_conflicting_fields_are_a_validation_error(body: dict[str, Any], param: str, words: str) -> None:
    """Catches an error type that differs from vLLM's, which finds them while it validates the body."""
    error = refused(chat(**body))
    assert error["param"] == param and words in error["message"] and error["type"] == "Bad Request"


def test_unknown_reasoning_effort_is_400() -> None:
    error = refused(chat(reasoning_effort="utmost"))
    assert error["param"] == "body.reasoning_effort" and "'low'" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none"},
        {"stream_options": {}},
        {"response_format": {"type": "text"}, "guided_json_object": False},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
        {"guided_choice": ["a", "b"], "guided_decoding_backend": "outlines"},
        {"best_of": 1, "modalities": ["text"], "media_io_kwargs": {}},
        {"best_of": 3, "n": 2, "temperature": 1},
        {"vllm_xargs": {"a": 1, "b": ["x", 2.5]}, "kv_transfer_params": {"do_remote_decode": False}},
        {"stop_token_ids": [257], "min_tokens": 1},
        {"functions": [{"name": "f"}], "function_call": "auto"},
        {"logprobs": True, "logprob_token_ids": [1, 2]},
        {"max_tokens": 5.0, "n": 1.0, "seed": 3.0, "top_k": -1.0, "priority": 0.0},
        {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"reasoning_effort": "low"},
        {"frequency_penalty": None, "n": None, "stream_options": None, "logprobs": None, "stop": None},
        {"unheard_of": {"deep": [1]}, "store": True},
        {"model": ""},
        {"model": "also-fake"},
        {"temperature": 1, "seed": -1, "top_k": -1},
    ],
)
def test_default_values_of_unsupported_fields_are_accepted(body: dict[str, Any]) -> None:
    assert chat(**body).json()["model"] == "fake"


def test_max_n_is_configurable() -> None:
    assert refused(chat(n=3, settings={"max_n": 2}))["param"] == "n"


def test_unknown_model_is_404() -> None:
    error = refused(chat(model="x"), 404)
    assert error == {
        "message": "The model `x` does not exist. This server has: fake, also-fake.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_404_lists_at_most_ten_served_names() -> None:
    names = tuple(f"m{number}" for number in range(12))
    engine = FakeEngine()
    engine.facts = FakeFacts(model_names=names)
    error = refused(chat(engine, model="x"), 404)
    assert error["message"].endswith(f"This server has: {', '.join(names[:10])}, ....")


def test_unknown_fields_are_logged_once_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_params, "unknown_fields", UnknownFields(max_names=3))
    sent = {"max_token": 5, "a\nb": 1, "x" * 1000: 1, "fourth": 1, "best_of": 1, "guided_regex": None}
    with caplog.at_level("WARNING", sampling_params.logger.name):
        assert chat(temperature=0).status_code == 200 and not caplog.records
        for _ in range(2):
            assert chat(**sent).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    begin = "The following fields were present in the request but ignored: "
    assert [line.removeprefix(begin) for line in lines] == [
        "'max_token'; did you mean 'max_tokens'?",
        r"'a\nb'",
        f"'{'x' * 64}...'",
    ]


def test_longest_fitting_answer_is_allowed() -> None:
    """An off-by-one error would refuse requests that use the whole context."""
    prompt_len = len("user:hi\nassistant:")
    assert chat(max_tokens=512 - prompt_len, messages=MESSAGES).status_code == 200
    assert refused(chat(max_tokens=512 - prompt_len + 1))["param"] == "input_tokens"
