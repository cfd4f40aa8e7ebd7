"""Tests of the official OpenAI client, with strict validation of every reply, against a real server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from serve_process import LONGEST, ServeProcess
from tiny_text import TextModel

from quire.text.tokenizer import load_tokenizer

MESSAGES: Any = [{"role": "user", "content": "The quick brown fox"}]
PLAIN: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def lenient(client: OpenAI) -> Iterator[OpenAI]:
    """Client for replies that OpenAI's own schema of completions does not allow: stream chunks without a
    finish reason, and an echoed first token without a logprob."""
    with client.with_options(_extra_kwargs={"_strict_response_validation": False}) as made:
        yield made


def test_completion_equals_transformers(client: OpenAI, tiny: TextModel) -> None:
    """Catches a prompt or an answer that changes on its way through three processes."""
    tokenizer = load_tokenizer(tiny.path, "hf")
    prompt = tokenizer.encode("A page is a block")
    reply = client.completions.create(model="tiny", prompt="A page is a block", max_tokens=12, **PLAIN)
    assert reply.choices[0].text == tokenizer.decode(tiny.greedy(prompt, 12), skip_special_tokens=True)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 12)
    assert reply.model == "tiny"


def test_batches_of_token_ids(client: OpenAI, tiny: TextModel) -> None:
    """Catches batched token-id prompts that are mixed up, or choices that are not grouped by prompt."""
    prompts = [[5, 6, 7], [40, 41, 42, 43]]
    reply = client.completions.create(
        model="also-tiny",
        prompt=prompts,
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids = [choice.model_dump()["token_ids"] for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert token_ids == [tiny.greedy(prompt, 4) for prompt in prompts]


def test_streamed_completion_equals_the_complete_one(client: OpenAI, lenient: OpenAI) -> None:
    """Catches deltas that lose, repeat or reorder text, and a usage chunk that miscounts."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "One two",
        "max_tokens": 20,
        "n": 2,
        "seed": 5,
        "temperature": 0.9,
    }
    whole = client.completions.create(**fields, extra_body={"ignore_eos": True})
    texts, ends, usage = ["", ""], {}, None
    for chunk in lenient.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    ):
        for choice in chunk.choices:
            assert choice.index not in ends, "text after the finish reason"
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1], "the second sequence has a seed of its own"
    assert ends == {0: "length", 1: "length"}
    assert usage == whole.usage


def test_streamed_chat_equals_the_complete_one(client: OpenAI) -> None:
    """Catches a missing role chunk, or a finish reason apart from the last text."""
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, **PLAIN)
    chunks = list(
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, stream=True, **PLAIN)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}


def test_chat_logprobs(client: OpenAI) -> None:
    """Catches logprobs of other tokens than those of the text."""
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, **PLAIN
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top_logprob.logprob for top_logprob in token.top_logprobs) <= 0


def test_completion_logprobs_with_echo(lenient: OpenAI) -> None:
    """Catches offsets that do not point at their tokens, and prompt tokens without logprobs."""
    reply = lenient.completions.create(
        model="tiny", prompt="One two three", max_tokens=3, logprobs=2, echo=True, **PLAIN
    )
    choice = reply.choices[0]
    assert choice.text.startswith("One two three")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert reply.usage is not None
    assert len(choice.logprobs.token_logprobs) == reply.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_stop_string_ends_the_answer(client: OpenAI, lenient: OpenAI) -> None:
    """Catches a stop string that is shown, or that the engine runs past."""
    free = client.completions.create(model="tiny", prompt="The dog", max_tokens=30, **PLAIN).choices[0].text
    stop = free[8:11]
    for stream in (False, True):
        fields: dict[str, Any] = {
            "model": "tiny",
            "prompt": "The dog",
            "max_tokens": 30,
            "stop": [stop],
            **PLAIN,
        }
        if stream:
            choices = [chunk.choices[0] for chunk in lenient.completions.create(**fields, stream=True)]
        else:
            choices = client.completions.create(**fields).choices
        assert "".join(choice.text for choice in choices) == free[: free.index(stop)]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].model_dump()["stop_reason"] == stop


def test_seed_fixes_the_answer(client: OpenAI) -> None:
    """Catches seeds that are dropped on the way, and unseeded requests that all get the same answer."""

    def sample(seed: int | None) -> str:
        reply = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=16, temperature=1.5, seed=seed
        )
        return reply.choices[0].message.content or ""

    assert sample(7) == sample(7) != sample(8)
    assert sample(None) != sample(None)


def test_invalid_requests_get_specific_errors(client: OpenAI) -> None:
    """Catches invalid requests that are answered with a 500, without a message, or by the engine."""
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist"):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match=f"max_model_len={LONGEST}"):
        client.completions.create(model="tiny", prompt="x", max_tokens=LONGEST + 1)
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {LONGEST}"):
        client.completions.create(model="tiny", prompt="x" * (LONGEST + 100))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="tiny", prompt=[999_999])
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format={"type": "x"})  # type: ignore
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_answer_follows_the_json_schema(client: OpenAI) -> None:
    """Check streamed and complete answers; API process and core refuse an unsupported schema."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }
    tight = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    for seed in range(4):
        fields: dict[str, Any] = {"model": "tiny", "temperature": 1.5, "seed": seed, "max_tokens": 200}
        whole = client.chat.completions.create(
            messages=MESSAGES, response_format=response_format, **fields
        ).choices[0]
        if whole.finish_reason == "stop":
            assert json.loads(whole.message.content or "") in ({"a": 1}, {"a": "x"})
        plain = client.completions.create(prompt="x", extra_body=tight, **fields)
        assert plain.choices[0].text in ('{"a":1}', '{"a":"x"}')
        stream = client.chat.completions.create(messages=MESSAGES, stream=True, extra_body=tight, **fields)
        assert "".join(part.choices[0].delta.content or "" for part in stream) in ('{"a":1}', '{"a":"x"}')
    schema["properties"] = {"a": {"type": "strange"}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="strange"):
            client.chat.completions.create(
                model="tiny", messages=MESSAGES, response_format=response_format, stream=stream
            )


def test_models_are_listed_by_every_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").id == "also-tiny"


def test_tokenize_round_trip(server: ServeProcess, tiny: TextModel) -> None:
    """Catches a tokenizer that is not the engine's."""
    text = "naïve café, 日本語, 🙂"
    expected = load_tokenizer(tiny.path, "hf").encode(text)
    reply_body = server.client.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
    assert (reply_body["tokens"], reply_body["count"], reply_body["max_model_len"]) == (
        expected,
        len(expected),
        LONGEST,
    )
    back = server.client.post("/detokenize", json={"model": "tiny", "tokens": reply_body["tokens"]}).json()
    assert back["prompt"] == "<s>" + text
    chat = server.client.post("/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()
    assert chat["count"] > reply_body["count"] // 2


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b'{"model": "tiny", "prompt": []}', 400),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": "hello"}', 400),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": []}', 400),
        ("/v1/nowhere", b"{}", 404),
        ("/health", b"{}", 405),
    ],
)
def test_malformed_bodies_are_refused(server: ServeProcess, path: str, content: bytes, status: int) -> None:
    """Catches a malformed body that is accepted or breaks the server."""
    reply = server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    assert server.health() == 200


def test_small_routes(server: ServeProcess) -> None:
    def get(path: str) -> httpx.Response:
        return server.client.get(path)

    assert (get("/health").status_code, get("/health").content) == (200, b"")
    assert get("/ping").status_code == server.client.post("/ping").status_code == 200
    assert get("/load").json() == {"server_load": 0}
    assert get("/version").json()["version"]
    assert server.client.post("/reset_prefix_cache").status_code == 404  # developer mode only
    assert "<title>" in get("/").text
    assert "/v1/chat/completions" in get("/openapi.json").json()["paths"]
