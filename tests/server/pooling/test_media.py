"""Tests of images over the routes of pooling models: the prompts they give, and the errors of invalid
ones."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from ask import CROSS_ENCODER, EMBEDDER, fetch, refused
from disconnecting import post
from fake_engine import FakeEngine, byte_tokenizer, numbers
from fake_inputs import END, PAD, START, data_url, file_of, image_part, media, picture
from hostile import hostile_server

from quire.frontend.multimodal import MediaInputReader
from quire.server.app import Application
from quire.server.settings import make_settings

URL, OTHER = (data_url(file_of(picture(seed=seed))) for seed in (0, 1))
SPAN = [START, PAD, PAD, END]
TEXT = {"type": "text", "text": "ab"}
BROKEN = data_url(file_of(picture(60, 60))[:400])
TOO_MANY = "At most 1 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt`"


def engine_of(facts: Any, reader: MediaInputReader | None = None) -> FakeEngine:
    engine = FakeEngine(pooling=facts)
    engine.inputs.media = reader or media()
    return engine


def send(engine: FakeEngine, path: str, **body: Any) -> httpx.Response:
    return fetch(Application(engine, make_settings({})).asgi, "POST", path, json=body)


def read_prompts(engine: FakeEngine) -> list[list[int]]:
    prompts = [prompt for _, prompt, *_ in engine.pooled]
    assert all((prompt.media is not None) == (PAD in prompt.token_ids) for prompt in prompts)
    return [prompt.token_ids for prompt in prompts]


def ids(*parts: str | list[int]) -> list[int]:
    encode = byte_tokenizer().encode
    return [token_id for part in parts for token_id in (encode(part) if isinstance(part, str) else part)]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_conversation_with_images_is_embedded(path: str) -> None:
    engine = engine_of(EMBEDDER)
    messages = [{"role": "user", "content": [TEXT, image_part(URL)]}]
    reply = send(engine, path, messages=messages).json()
    prompt = ids("user:", SPAN, "\nab\n")
    assert read_prompts(engine) == [prompt]
    vector = reply["data"][0]["embedding" if path == "/v1/embeddings" else "data"]
    assert vector == pytest.approx(numbers(prompt, 6).tolist())
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    cut = send(engine, path, messages=messages, truncate_prompt_tokens=-1)
    assert cut.status_code == 200 and engine.pooled[-1][1].prepared


def test_cohere_content_parts_and_images() -> None:
    engine = engine_of(replace(EMBEDDER, instructions=(("query", "q: "),)))
    pieces = [{"content": [TEXT, image_part(URL)]}, {"content": [TEXT]}]
    reply = send(engine, "/v2/embed", inputs=pieces, input_type="query").json()
    assert reply["meta"]["billed_units"] == {"input_tokens": 23, "image_tokens": 4}
    send(engine, "/v2/embed", images=[URL, OTHER], input_type="query")
    expected = [("user:", SPAN, "\nq: ab\n"), ("user:q: ab\n",), *[("user:", SPAN, "\n")] * 2]
    assert read_prompts(engine) == [ids(*item) for item in expected]
    keys = [prompt.media.items[0].key for _, prompt, *_ in engine.pooled if prompt.media]
    assert keys[0] == keys[1] != keys[2]
    assert engine.inputs.tokenizer is not None
    engine.inputs.tokenizer.chat_template = None
    send(engine, "/v2/embed", images=[URL])
    assert read_prompts(engine)[-1] == SPAN


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_embeddings_of_texts_and_images_are_compared(path: str) -> None:
    engine = engine_of(EMBEDDER)
    query, documents = {"content": [image_part(URL)]}, ["ab", {"content": [TEXT, image_part(OTHER)]}]
    names = ("query", "documents") if path == "/rerank" else ("data_1", "data_2")
    reply = send(engine, path, **dict(zip(names, (query, documents), strict=True))).json()
    prompts = [SPAN, ids("ab"), ids(SPAN, "\nab")]
    assert read_prompts(engine) == prompts
    vectors = [numbers(prompt, 6).astype(float) for prompt in prompts]
    expected = [
        float(vectors[0] @ vector / (vectors[0] @ vectors[0] * (vector @ vector)) ** 0.5)
        for vector in vectors
    ]
    if path == "/score":
        assert [entry["score"] for entry in reply["data"]] == pytest.approx(expected[1:])
    else:
        results = {result["index"]: result for result in reply["results"]}
        assert [results[index]["relevance_score"] for index in (0, 1)] == pytest.approx(expected[1:])
        assert results[0]["document"] == {"text": "ab"}
        assert results[1]["document"] == {"multi_modal": documents[1]["content"]}  # type: ignore[index]


def test_pairs_with_images_are_one_prompt() -> None:
    """With a template or without one; the image of the query is preprocessed once for all documents."""
    engine = engine_of(CROSS_ENCODER)
    query = {"content": [image_part(URL), TEXT]}
    documents = ["cd", {"content": [image_part(OTHER)]}]
    assert send(engine, "/rerank", query=query, documents=documents).status_code == 200
    assert read_prompts(engine) == [ids(SPAN, "\nabcd"), ids(SPAN, "\nab", SPAN)]
    seen = engine.inputs.media._media_processor.processor.seen  # type: ignore[union-attr]
    assert len(seen) == 2  # type: ignore[arg-type]
    engine.facts.chat_template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    send(engine, "/rerank", query="ef", documents=documents)
    assert read_prompts(engine)[2:] == [ids("query=ef;document=cd;"), ids("query=ef;document=", SPAN, ";")]
    send(engine, "/score", data_1=query, data_2=documents[1], mm_processor_kwargs={"side": 10})
    assert len(engine.pooled[-1][1].token_ids) == len(ids("query=\nab;document=;")) + 8


@pytest.mark.parametrize("facts", [EMBEDDER, CROSS_ENCODER])
@pytest.mark.parametrize(
    ("url", "status", "words"),
    [(BROKEN, 400, "broken or truncated"), ("http://127.0.0.1:1/x.png", 422, "private, local")],
)
def test_invalid_image_is_refused_with_its_position(facts: Any, url: str, status: int, words: str) -> None:
    """No part of the call runs, and the next call succeeds."""
    engine = engine_of(facts)
    content = {"content": [TEXT, image_part(url)]}
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("/rerank", "documents[1].content[1]", {"query": "a", "documents": ["b", content]}),
        ("/score", "text_1.content[1]", {"text_1": content, "text_2": ["b", "c"]}),
    ]
    if facts is EMBEDDER:
        calls += [
            ("/v2/embed", "images[1]", {"images": [URL, url]}),
            ("/v2/embed", "inputs[1].content[1]", {"inputs": [{"content": [TEXT]}, content]}),
            ("/v1/embeddings", "messages[0].content[1]", {"messages": [{"role": "user", **content}]}),
        ]
    for path, name, body in calls:
        error = refused(send(engine, path, **body), status)
        assert error["message"].startswith(f"{name}: ") and words in error["message"]
        kind = "UnprocessableEntityError" if status == 422 else "BadRequestError"
        assert (error["type"], error["param"]) == (kind, "image_url")
    assert not engine.pooled
    good = {"query": "a", "documents": ["b", {"content": [image_part(URL)]}]}
    assert send(engine, "/rerank", **good).status_code == 200


def test_image_limit_holds_for_each_prompt() -> None:
    engine = engine_of(EMBEDDER, media({"image": 1}))
    one, two = {"content": [image_part(URL)]}, {"content": [image_part(URL), image_part(OTHER)]}
    body = {"query": one, "documents": [one, one]}
    assert send(engine, "/rerank", **body).status_code == 200
    error = refused(send(engine, "/rerank", query=one, documents=["a", two]))
    assert error["message"].startswith(f"documents[1]: {TOO_MANY}")
    pairs = engine_of(CROSS_ENCODER, media({"image": 1}))
    error = refused(send(pairs, "/rerank", **body))  # both images are in one prompt
    assert error["message"].startswith(f"documents[0]: {TOO_MANY}")
    blind = FakeEngine(pooling=EMBEDDER)
    assert "is not a multimodal model" in refused(send(blind, "/rerank", **body))["message"]


def test_length_limit_holds_for_each_prompt() -> None:
    """Sixteen images fit although two of them would be too long for one prompt; truncation is refused."""
    engine = engine_of(EMBEDDER, media(max_tokens=6))
    assert send(engine, "/v2/embed", images=[URL] * 16).status_code == 200
    two = refused(send(engine, "/v2/embed", inputs=[{"content": [image_part(URL), image_part(OTHER)]}]))
    assert "the media of the prompt have at least 8 placeholder tokens" in two["message"]
    cut = refused(send(engine, "/v2/embed", images=[URL], max_tokens=5))
    assert cut["message"].startswith("images: the prompt has 10 tokens, and as it has media it cannot be cut")


def test_media_fetch_ends_when_the_client_disconnects() -> None:
    async def go(url: str, requests: list[Any]) -> None:
        reader = media(allowed_media_domains=("127.0.0.1",), env={"image_fetch_timeout": 300.0})
        engine = engine_of(EMBEDDER, reader)
        application, disconnect = Application(engine, make_settings({})), asyncio.Event()

        slow = image_part(f"{url}/drips")
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/v2/embed", {"images": [f"{url}/drips"]}),
            ("/rerank", {"query": "a", "documents": [{"content": [slow]}]}),
            ("/v1/embeddings", {"messages": [{"role": "user", "content": [slow]}]}),
        ]
        tasks = [asyncio.create_task(post(application, *call, disconnect)) for call in calls]
        async with asyncio.timeout(60):
            while sum(path == "/drips" for path, _ in requests) < len(calls):
                await asyncio.sleep(0.01)
            disconnect.set()
            assert await asyncio.gather(*tasks) == [499] * len(calls)
        assert not engine.pooled and not application.api.running_requests

    with hostile_server() as server:
        asyncio.run(go(server.url, server.requests))
