"""Tests of /v1/completions: prompts in every form, echo, logprobs, several choices."""

import asyncio
from typing import Any

import pytest
from ask import COMPLETIONS, client_of, complete, events, refused
from fake_engine import ANSWER, EOS, FakeEngine, byte_tokenizer

from quire.server.app import Application
from quire.server.http import fast_path
from quire.server.openai import streams
from quire.server.settings import make_settings


def test_default_max_tokens_is_16() -> None:
    engine = FakeEngine()
    reply = complete(engine).json()
    assert engine.seen[0][2].max_tokens == 16 and reply["choices"][0]["text"] == ANSWER[:15]
    complete(engine, max_tokens=None)
    assert engine.seen[1][2].max_tokens == 16


@pytest.mark.parametrize("padding", [0, fast_path._LARGE])
def test_texts_of_numbers_and_booleans_are_converted(padding: int) -> None:
    """Catches a client that works with vLLM, which converts them, and is refused here."""
    engine = FakeEngine()
    sent = {"max_tokens": "3", "temperature": "0.5", "top_p": "1", "ignore_eos": "true", "echo": 1}
    assert complete(engine, user="a" * padding, **sent).json()["choices"][0]["text"] == "abHel"
    params = engine.seen[0][2]
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (3, 0.5, True)


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": "3.5"},
        {"max_tokens": "three"},
        {"max_tokens": True},
        {"max_tokens": "9" * 30},
        {"temperature": "nan"},
        {"temperature": "1e5"},
        {"temperature": "0.5", "stop": 5},
        {"stream": "maybe"},
        {"stream": 2},
        {"echo": []},
    ],
)
def test_other_texts_are_no_numbers_or_booleans(field: dict[str, Any]) -> None:
    error = refused(complete(**field))
    assert error["type"] == "Bad Request" and error["param"] == f"body.{next(iter(field))}"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[64, 65]]),
        (["ab", "c"], [[64, 65], [66]]),
        ([64, 65], [[64, 65]]),
        ([[64], [65, 66]], [[64], [65, 66]]),
    ],
)
def test_every_prompt_form(prompt: Any, expected: list[list[int]]) -> None:
    engine = FakeEngine()
    reply = complete(engine, prompt=prompt, max_tokens=2).json()
    assert [seen[1].token_ids for seen in engine.seen] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_grouped_by_prompt(stream: bool) -> None:
    response = complete(prompt=["a", "b"], n=2, max_tokens=3, echo=True, stream=stream)
    if stream:
        texts = ["", "", "", ""]
        for chunk in events(response):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in sorted(response.json()["choices"], key=lambda c: c["index"])]
    assert texts == ["aHel", "aHel", "bHel", "bHel"]


def test_last_text_chunk_has_the_finish_reason() -> None:
    chunks = events(complete(stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["H", "e", "l"]
    assert chunks[2]["choices"][0]["finish_reason"] == "length" and chunks[3]["choices"] == []
    assert chunks[3]["usage"] == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    assert all("usage" not in chunk for chunk in chunks[:3])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_max_tokens_0(stream: bool) -> None:
    response = complete(max_tokens=0, echo=True, logprobs=1, stream=stream)
    choice = events(response)[0]["choices"][0] if stream else response.json()["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1]
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


def test_max_tokens_0_without_echo_is_refused() -> None:
    assert refused(complete(max_tokens=0))["param"] == "max_tokens"


def test_token_ids_are_echoed_as_text() -> None:
    assert complete(prompt=[64, 65], echo=True, max_tokens=1).json()["choices"][0]["text"] == "abH"


def test_echo_keeps_special_tokens() -> None:
    """Catches an echoed prompt that is shorter than the original."""
    text = complete(prompt=[64, EOS], echo=True, max_tokens=1).json()["choices"][0]["text"]
    assert text == f"a{byte_tokenizer().decode([EOS], skip_special_tokens=False)}H"


def test_logprob_offsets_continue_across_chunks() -> None:
    chunks = events(complete(stream=True, logprobs=0, max_tokens=3))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2]]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] == [{"H": -1.0}]


def test_return_token_ids_and_prompt_logprobs_per_choice() -> None:
    engine = FakeEngine()
    choice = complete(engine, return_token_ids=True, prompt_logprobs=0, max_tokens=2).json()["choices"][0]
    assert choice["token_ids"] == engine.script[:2] and choice["prompt_token_ids"] == [64, 65]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt": None}, "prompt", "Either prompt or prompt_embeds"),
        ({"prompt": ["a"] * 1025}, "prompt", "exceeds the maximum allowed count of 1024"),
        ({"prompt": [999]}, "prompt", "Token id 999 is out of vocabulary"),
        ({"suffix": "x"}, "suffix", "suffix is not currently supported"),
        ({"prompt_embeds": "x"}, "prompt_embeds", "You must set `--enable-prompt-embeds`"),
        ({"prompt": [[]]}, "prompt", "cannot be empty"),
        (
            {"logprobs": 21},
            "logprobs",
            "Requested sample logprobs of 21, which is greater than max allowed: 20",
        ),
    ],
)
def test_invalid_fields_are_refused(body: dict[str, Any], param: str, words: str) -> None:
    error = refused(complete(**body))
    assert error["param"] == param and words in error["message"]


def test_one_invalid_prompt_starts_no_request() -> None:
    engine = FakeEngine()
    refused(complete(engine, prompt=[[64], [999]], stream=True))
    assert engine.seen == [] and engine.num_in_flight == 0


def test_one_failed_prompt_aborts_the_others() -> None:
    engine = FakeEngine(fail_after=1)
    refused(complete(engine, prompt=["a", "b", "c"]), 500)
    assert len(engine.aborted) == 3 and engine.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_the_echoed_prompt_logprobs(stream: bool) -> None:
    """The engine sends them once, with the first output; the other choices need them too."""
    response = complete(
        prompt="abc",
        n=3,
        max_tokens=1,
        echo=True,
        logprobs=1,
        temperature=1.0,
        stream=stream,
        ignore_eos=True,
    )
    chunks = events(response) if stream else [response.json()]
    seen: dict[int, list[float | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert seen == dict.fromkeys(range(3), [None, -1.0, -1.0, -1.0])


async def test_large_call_is_started_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests run while hundreds of sequences are started."""
    monkeypatch.setattr(streams, "MAX_BLOCKING_S", 0.0)
    engine = FakeEngine()
    body = {"prompt": ["ab"] * 200, "n": 16, "temperature": 1.0, "max_tokens": 1}
    async with client_of(Application(engine, make_settings({})).asgi) as client:
        large = asyncio.create_task(client.post(COMPLETIONS, json=body, timeout=60))
        seen = set()
        while not large.done():
            seen.add(len(engine.seen))
            await asyncio.sleep(0)
        assert (await large).status_code == 200 and len((await large).json()["choices"]) == 3200
        assert len(seen) > 190
