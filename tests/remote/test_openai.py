"""Streams and errors of OpenAI-like servers, the broken ones too."""

import asyncio
import json

import pytest
from fake_openai import MODEL, FakeServer

from quire.remote.http import HttpClient, Response, ServerGone
from quire.remote.openai import BadAnswer, Chunk, CompletionStream, bearer, error_of, models, stream


def chunks(server: FakeServer, prompt: str, *, chat: bool = False) -> list[Chunk]:
    found: list[Chunk] = []
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({**asked, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}})
    path = "/v1/chat/completions" if chat else "/v1/completions"

    async def main() -> None:
        client = HttpClient(server.url)
        try:
            await stream(client, path, body.encode(), found.append)
        finally:
            client.close()

    asyncio.run(main())
    return found


@pytest.mark.parametrize("chat", [False, True])
def test_text_and_usage(chat: bool) -> None:
    with FakeServer() as server:
        found = chunks(server, "hi", chat=chat)
    assert "".join(chunk.text for chunk in found) == "t0 t1 t2 t3 "
    usage = found[-1].usage
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
def test_a_broken_answer_is_an_error(prompt: str, error: type[Exception], says: str) -> None:
    with FakeServer() as server, pytest.raises(error, match=says):
        chunks(server, prompt)


def test_reasoning_counts_as_text() -> None:
    found: list[Chunk] = []
    reader = CompletionStream(found.append)
    reader.feed(b'data: {"choices": [{"delta": {"reasoning": "hm"}, "finish_reason": null}]}\n\n')
    assert found[0].text == "hm" and not reader.complete


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
def test_every_shape_of_error_becomes_one_line(body: bytes, says: str) -> None:
    assert error_of(Response(400, {}, body)) == says


def test_no_key_is_no_header() -> None:
    assert bearer(None) == {} and bearer("k") == {"Authorization": "Bearer k"}
