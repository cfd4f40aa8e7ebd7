"""Tests of streams and errors of OpenAI-like servers, broken ones included."""

import asyncio
import json

import pytest
from fake_openai import MODEL, FakeServer

from quire.remote.http import HttpClient, Response, ServerGone
from quire.remote.openai import BadAnswer, Chunk, CompletionStream, bearer, error_of, models, stream


def chunks(server: FakeServer, prompt: str, *, chat: bool = False) -> list[Chunk]:
    results: list[Chunk] = []
    request = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({**request, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}})
    path = "/v1/chat/completions" if chat else "/v1/completions"

    async def main() -> None:
        client = HttpClient(server.url)
        try:
            await stream(client, path, body.encode(), results.append)
        finally:
            client.close()

    asyncio.run(main())
    return results


@pytest.mark.parametrize("chat", [False, True])
def test_text_and_usage(chat: bool) -> None:
    with FakeServer() as server:
        result = chunks(server, "hi", chat=chat)
    assert "".join(chunk.text for chunk in result) == "t0 t1 t2 t3 "
    usage = result[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (7, 4)


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("refuse", BadAnswer, "HTTP 400: asked to refuse"),
        ("fail", BadAnswer, "HTTP 500"),
        ("garbage", BadAnswer, "malformed event b'{no json'"),
        ("error", BadAnswer, "the engine died"),
        ("early", BadAnswer, "ended before the answer was complete"),
        ("drop", ServerGone, "was lost"),
    ],
)
def test_broken_answer_is_an_error(prompt: str, error: type[Exception], says: str) -> None:
    with FakeServer() as server, pytest.raises(error, match=says):
        chunks(server, prompt)


def test_reasoning_counts_as_text() -> None:
    results: list[Chunk] = []
    reader = CompletionStream(results.append)
    reader.feed(b'data: {"choices": [{"delta": {"reasoning": "hm"}, "finish_reason": null}]}\n\n')
    assert results[0].text == "hm" and not reader.complete


def test_models() -> None:
    with FakeServer() as server:
        (card,) = asyncio.run(models(HttpClient(server.url)))
        assert card.id == MODEL
        with pytest.raises(BadAnswer, match="HTTP 404: Not Found"):
            asyncio.run(models(HttpClient(server.url), "/v2/models"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "too\\n long", "code": 400}}', "HTTP 400: too long"),
        (b'{"error": "Unauthorized"}', "HTTP 400: Unauthorized"),
        (b'{"detail": "Not Found"}', "HTTP 400: Not Found"),
        (b"<html>", "HTTP 400: <html>"),
        (b"\xff", "HTTP 400: \ufffd"),
        (b"", "HTTP 400: no message"),
    ],
)
def test_every_error_form_becomes_one_line(body: bytes, says: str) -> None:
    assert error_of(Response(400, {}, body)) == says


def test_missing_key_sends_no_header() -> None:
    assert bearer(None) == {} and bearer("k") == {"Authorization": "Bearer k"}
