"""Tests of /v1/chat/completions: the format of complete and streamed answers."""

from typing import Any

import pytest
from ask import MESSAGES, chat, events, refused
from fake_engine import ANSWER, EOS, FakeEngine


def test_answer_has_text_finish_reason_and_usage() -> None:
    reply = chat(max_tokens=5).json()
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == ANSWER[:5]
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    prompt = len("user:hi\nassistant:")
    assert reply["usage"] == {"prompt_tokens": prompt, "total_tokens": prompt + 5, "completion_tokens": 5}
    assert reply["object"] == "chat.completion" and reply["model"] == "fake"
    assert reply["system_fingerprint"].startswith("quire-1.2.3-")
    assert "tool_calls" not in choice["message"]


def test_answer_ends_at_the_eos_token() -> None:
    (choice,) = chat().json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        ANSWER,
        "stop",
        None,
    )


def test_stream_starts_with_the_role_and_ends_with_the_finish_reason() -> None:
    chunks = events(chat(stream=True, max_tokens=4))
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert [choice["delta"] for choice in middle] == [{"content": "H"}, {"content": "e"}, {"content": "l"}]
    assert all(choice["finish_reason"] is None and "stop_reason" not in choice for choice in middle)
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({"content": "l"}, "length", None)
    assert [("system_fingerprint" in chunk) for chunk in chunks] == [False] * 4 + [True]
    assert not any("usage" in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["object"] == "chat.completion.chunk"


def test_stream_equals_the_complete_answer() -> None:
    """Characters of several bytes, split over tokens, must not be lost between chunks."""
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in events(chat(stream=True)))
    assert text == ANSWER


def test_every_choice_of_n_has_role_and_text() -> None:
    chunks = events(chat(stream=True, n=3, max_tokens=3, temperature=1.0))
    for index in range(3):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "length"
        assert "".join(choice["delta"]["content"] for choice in choices) == "Hel"
    assert [c["message"]["content"] for c in chat(n=3, max_tokens=3).json()["choices"]] == ["Hel"] * 3


@pytest.mark.parametrize("settings", [{}, {"enable_force_include_usage": True}])
def test_stream_usage(settings: dict[str, Any]) -> None:
    options = {} if settings else {"include_usage": True}
    fields: dict[str, Any] = (
        {} if settings else {"stream_options": options | {"continuous_usage_stats": True}}
    )
    chunks = events(chat(stream=True, max_tokens=2, settings=settings, **fields))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]
    of_three = events(chat(stream=True, n=3, max_tokens=2, settings=settings, **fields))
    assert of_three[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["choices"] == [] and "system_fingerprint" in chunks[-1]
    only_last = events(chat(stream=True, max_tokens=2, stream_options={"include_usage": True}))
    assert ["usage" in chunk for chunk in only_last] == [False, False, False, True]
    assert not any(
        "usage" in chunk for chunk in events(chat(stream=True, stream_options={"include_usage": False}))
    )


def test_cached_tokens_are_reported_if_enabled() -> None:
    assert "prompt_tokens_details" not in chat().json()["usage"]
    usage = chat(settings={"enable_prompt_tokens_details": True}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3, "created_cache_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_top_logprobs_are_sorted_and_finite(stream: bool) -> None:
    response = chat(max_tokens=2, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        parts = [c["choices"][0]["logprobs"]["content"] for c in events(response)[1:]]
        content = [entry for part in parts for entry in part]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"] and content[0]["bytes"] == [72]
    assert [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]][:2] == [
        ("!", -0.5),
        ("H", -1.0),
    ]
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0
    assert chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_partial_character_token_keeps_its_bytes() -> None:
    content = chat(FakeEngine("ż"), logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes([byte for entry in content[:2] for byte in entry["bytes"]]).decode() == "ż"


def test_tokens_as_ids_and_return_token_ids() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 2,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    engine = FakeEngine()
    reply = chat(engine, **fields).json()
    ids = engine.script[:2]
    assert reply["choices"][0]["token_ids"] == ids
    assert [e["token"] for e in reply["choices"][0]["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
    assert reply["prompt_token_ids"] == engine.seen[0][1].token_ids
    chunks = events(chat(stream=True, **fields))
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True, False, False]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, ids[:1], ids[1:]]


def test_prompt_logprobs_start_with_null() -> None:
    logprobs = chat(prompt_logprobs=1, max_tokens=1).json()["prompt_logprobs"]
    assert logprobs[0] is None and len(logprobs) == len("user:hi\nassistant:")
    assert all(entry.keys() == {"logprob", "rank", "decoded_token"} for entry in logprobs[1].values())


def test_stop_string_is_removed_and_reported() -> None:
    (choice,) = chat(stop=[", w"]).json()["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Hello", ", w")
    chunks = events(chat(stop=", w", stream=True))
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Hello"
    assert (chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["choices"][0]["stop_reason"]) == (
        "stop",
        ", w",
    )


def test_error_in_a_stream_is_an_event_before_done() -> None:
    chunks = events(chat(FakeEngine(fail_after=2), stream=True))
    assert chunks[-1]["error"]["code"] == 500 and chunks[-1]["error"]["type"] == "InternalServerError"
    assert refused(chat(FakeEngine(fail_after=2)), 500)["message"] == "the engine failed on this request"


def test_continue_final_message_with_echo() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    body: dict[str, Any] = {
        "messages": messages,
        "echo": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    engine = FakeEngine()
    assert chat(engine, max_tokens=5, **body).json()["choices"][0]["message"]["content"] == "Well, Hello"
    assert (engine.seen[0][1].text or "").endswith("assistant:Well, ")
    chunks = events(chat(stream=True, max_tokens=5, **body))
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Well, Hello"


def test_max_completion_tokens_and_default_max_tokens() -> None:
    engine = FakeEngine(max_model_len=64)
    chat(engine, max_tokens=9, max_completion_tokens=3)
    chat(engine)
    engine.facts.default_sampling = {"max_tokens": 7, "temperature": 0.25}
    chat(engine)
    all_params = [params for _, _, params, _ in engine.seen]
    assert [params.max_tokens for params in all_params] == [3, 64 - 18, 7]
    assert (all_params[0].temperature, all_params[2].temperature) == (1.0, 0.25)


def test_choices_are_sampled_though_the_model_is_greedy_by_default() -> None:
    """Catches a refusal of n=2 for a temperature that the client has not set."""
    engine = FakeEngine()
    engine.facts.default_sampling = {"temperature": 0.0}
    assert chat(engine).status_code == chat(engine, n=2).status_code == 200
    assert [params.temperature for _, _, params, _ in engine.seen] == [0.0, 1.0]
    assert chat(engine, n=2, temperature=0).status_code == 400


def test_sampling_fields_reach_the_engine() -> None:
    """A field that is accepted and then dropped would silently change results."""
    body: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 5, "stop": ["x"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "allowed_token_ids": [1, 2], "bad_words": ["y"],
        "logit_bias": {"4": 200}, "n": 2, "max_tokens": 6, "stream_interval": 2,
    }  # fmt: skip
    engine = FakeEngine()
    assert chat(engine, **body, priority=3, cache_salt="s").status_code == 200
    _, prompt, params, priority = engine.seen[0]
    expected = {**body, "logit_bias": {4: 100.0}}
    assert {name: getattr(params, name) for name in body} == expected
    assert priority == 3 and prompt.cache_salt == "s"


def test_eos_token_can_be_included() -> None:
    (choice,) = chat(skip_special_tokens=False, include_stop_str_in_output=True, stop_token_ids=[EOS]).json()[
        "choices"
    ]
    assert choice["message"]["content"] == ANSWER + "</s>"
