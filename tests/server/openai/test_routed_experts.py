"""Tests of `routed_experts` in the answers of all routes that return it."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from ask import ask, events
from fake_engine import ANSWER, FakeEngine, byte_tokenizer

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
PROMPT = byte_tokenizer().encode("abcd", add_special_tokens=False)
MESSAGES = [{"role": "user", "content": "abcd"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 3, "routed_experts_prompt_start": 2},
    CHAT: {"messages": MESSAGES, "max_tokens": 3, "routed_experts_prompt_start": 2},
    GENERATE: {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 3, "routed_experts_prompt_start": 2},
    },
}


def expected_of(engine: FakeEngine) -> list[int]:
    """Return the experts of the last prompt from its third token on, and of the answer but its last token."""
    answer = engine.tokenizer.encode(ANSWER, add_special_tokens=False)[:2]
    return [token % 8 for token in (*engine.seen[-1][1].token_ids[2:], *answer)]


def experts(choice: dict[str, Any]) -> list[int]:
    array = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert array.dtype == np.uint8 and array.shape[1:] == (1, 1)
    return array.ravel().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", BODIES)
def test_whole_answers_have_the_experts_of_all_computed_tokens(path: str) -> None:
    engine = FakeEngine()
    engine.returns_experts = True
    (choice,) = ask("POST", path, engine=engine, json=BODIES[path]).json()["choices"]
    assert experts(choice) == expected_of(engine)
    (choice,) = ask("POST", path, engine=FakeEngine(), json=BODIES[path]).json()["choices"]
    assert "routed_experts" not in choice


def test_last_chunk_of_a_stream_of_tokens_has_the_experts_and_each_its_masks() -> None:
    engine = FakeEngine()
    engine.returns_experts = True
    *before, last = events(ask("POST", GENERATE, engine=engine, json=BODIES[GENERATE] | {"stream": True}))
    assert experts(last["choices"][0]) == expected_of(engine)
    assert all("routed_experts" not in chunk["choices"][0] for chunk in before)
    for chunk in (*before, last):
        assert chunk["choices"][0]["sampling_mask"] == [[id] for id in chunk["choices"][0]["token_ids"]]


def test_prompt_start_behind_the_prompt_is_refused() -> None:
    """vLLM's engine ends with such a request."""
    reply = ask(
        "POST",
        COMPLETIONS,
        engine=FakeEngine(),
        json=BODIES[COMPLETIONS] | {"routed_experts_prompt_start": 4},
    )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "routed_experts_prompt_start"
