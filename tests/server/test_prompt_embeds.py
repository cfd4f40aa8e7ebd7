"""Tests of prompt embeddings in request bodies, alone and with other fields."""

from typing import Any

import pytest
import torch
from ask import chat, complete, refused
from fake_engine import FakeEngine
from saved import sent

from quire.frontend.prompt_embeds import PromptEmbedsReader

EMBEDS = sent(torch.ones(3, 4))


def open_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.inputs.embeds = PromptEmbedsReader(4, "float32")
    return engine


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        ({"prompt": None}, [3]),
        ({"prompt": ""}, [3]),
        ({"prompt": "abcde"}, [3, 5]),
        ({"prompt": ["a", "bc"], "prompt_embeds": [EMBEDS, sent(torch.ones(2, 4).half())]}, [3, 2, 1, 2]),
    ],
)
def test_prompt_embeds_come_before_text_prompts(body: dict[str, Any], lengths: list[int]) -> None:
    engine = open_engine()
    answer = complete(engine, **{"prompt_embeds": EMBEDS, "max_tokens": 2, "cache_salt": "s"} | body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(lengths)))
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    prompts = [prompt for _, prompt, _, _ in engine.seen]
    assert [len(prompt.token_ids) for prompt in prompts] == lengths
    assert all(prompt.cache_salt == "s" for prompt in prompts)
    assert [prompt.embeds is not None for prompt in prompts] == sorted(
        (prompt.embeds is not None for prompt in prompts), reverse=True
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": {"a": 1}}, "prompt_embeds"),
        ({"max_tokens": 600}, "max_tokens"),
    ],
)
def test_fields_that_need_tokens_are_refused(body: dict[str, Any], param: str) -> None:
    engine = open_engine()
    error = refused(complete(engine, **{"prompt": None, "prompt_embeds": EMBEDS} | body))
    assert (error["param"] or "").startswith(param) or param in error["message"]
    assert not engine.seen


def test_an_empty_list_of_embeddings_is_no_prompt() -> None:
    error = refused(complete(open_engine(), prompt=None, prompt_embeds=[]))
    assert error["message"] == "Either prompt or prompt_embeds must be provided and non-empty."
    assert complete(open_engine(), prompt="ab", prompt_embeds=[]).status_code == 200


def test_chat_refuses_prompt_embeds() -> None:
    """Catches a field that is ignored instead of refused."""
    assert refused(chat(open_engine(), prompt_embeds=EMBEDS))["param"] == "prompt_embeds"
    parts = [{"type": "prompt_embeds", "data": EMBEDS}]
    error = refused(chat(open_engine(), messages=[{"role": "user", "content": parts}]))
    assert "content part of type 'prompt_embeds' is not supported" in error["message"]
