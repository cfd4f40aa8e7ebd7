"""Tests of beam search over the API."""

import asyncio

import pytest
from ask import COMPLETIONS, application_of, chat, client_of, complete, refused
from fake_engine import FakeEngine

from quire.server.openai import streams


def test_beams_are_sorted_by_score() -> None:
    """At each step '!' is the most likely token; the scripted token is second."""
    engine = FakeEngine()
    reply = complete(engine, use_beam_search=True, n=2, max_tokens=2, length_penalty=1.0).json()
    assert [choice["text"] for choice in reply["choices"]] == ["!!", "!H"]
    assert reply["usage"] == {"prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4}
    assert engine.num_in_flight == 0
    assert len(chat(use_beam_search=True, n=2, max_tokens=2).json()["choices"]) == 2


def test_beams_have_logprobs() -> None:
    choice = complete(use_beam_search=True, n=1, max_tokens=3, logprobs=1).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 3


def test_too_many_beams_are_refused_with_the_remedy() -> None:
    error = refused(complete(use_beam_search=True, n=11))
    assert error["param"] == "n" and "--max-logprobs" in error["message"]


@pytest.mark.parametrize("penalty", [1e308, -1e308])
def test_length_penalty_beyond_floats_is_refused(penalty: float) -> None:
    """Catches a 500 by a score that overflows or is divided by zero."""
    error = refused(complete(use_beam_search=True, n=2, length_penalty=penalty))
    assert error["param"] == "length_penalty" and "must be in [-16, 16]" in error["message"]
    assert complete(use_beam_search=True, n=2, length_penalty=penalty / 1e308 * 16).status_code == 200


async def test_beams_of_many_prompts_are_started_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 prompts of 10 beams are 10,000 requests per round: other requests run between them."""
    monkeypatch.setattr(streams, "MAX_BLOCKING_S", 0.0)
    engine = FakeEngine()
    body = {"prompt": ["ab"] * 30, "use_beam_search": True, "n": 3, "max_tokens": 2}
    async with client_of(application_of(engine, {}).asgi) as client:
        call, seen = asyncio.create_task(client.post(COMPLETIONS, json=body, timeout=60)), set()
        while not call.done():
            seen.add(len(engine.seen))
            await asyncio.sleep(0)
        assert (await call).status_code == 200
    assert len(engine.seen) == 30 + 30 * 3, "one beam a prompt in the first round, three in the second"
    assert len(seen) > 100


def test_failed_beam_step_leaves_no_request_running() -> None:
    engine = FakeEngine(fail_after=0)
    refused(complete(engine, use_beam_search=True, n=2), 500)
    assert engine.num_in_flight == 0
