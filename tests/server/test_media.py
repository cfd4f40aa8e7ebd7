"""Tests of media over HTTP: every API with messages accepts them, and reports invalid ones."""

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import httpx
import numpy as np
import pytest
from ask import CHAT, chat, fetch, refused
from disconnecting import post
from fake_engine import FakeEngine
from fake_inputs import PAD, START, data_url, engine_with_media, file_of, image_part, media, picture, wav
from hostile import hostile_server

from quire.server.app import Application
from quire.server.settings import make_settings

URL = data_url(file_of(picture()))
SOURCED = {"type": "image", "source": {"type": "url", "url": URL}}
TEXT = {"type": "text", "text": "ab"}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, SOURCED]}


def turn(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


ENGINE = engine_with_media()
APPLICATION = Application(ENGINE, make_settings({"enable_prompt_tokens_details": True}))
"""One application for all tests: building it takes longer than a request."""


def send(path: str = CHAT, **body: Any) -> httpx.Response:
    ENGINE.seen.clear()
    return fetch(APPLICATION.asgi, "POST", path, json=body)


def seen(engine: FakeEngine = ENGINE) -> list[tuple[str, int, int]]:
    """Return the items of the only request."""
    ((_, prompt, _, _),) = engine.seen
    assert prompt.media is not None
    for item in prompt.media.items:
        assert prompt.token_ids[item.offset : item.offset + 2] == [START, PAD]
    return [(item.modality, item.offset, item.length) for item in prompt.media.items]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": turn(TEXT, image_part(URL))}),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "ab"},
                            {"type": "input_image", "image_url": URL, "detail": "auto"},
                        ],
                    }
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": turn(
                    TEXT,
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": URL.partition(",")[2],
                        },
                    },
                ),
            },
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": turn(TEXT, SOURCED)},
        ),
    ],
    ids=["chat", "responses", "messages", "messages-url"],
)
def test_every_api_accepts_images(path: str, body: dict[str, Any]) -> None:
    reply = send(path, **body)
    assert reply.status_code == 200, reply.text
    assert seen() == [("image", len("user:"), 4)]
    usage = reply.json()["usage"]
    prompt_len = len("user:\nab\nassistant:") + 4
    num_input = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    assert num_input + usage.get("cache_read_input_tokens", 0) == prompt_len


def test_tool_results_may_hold_images() -> None:
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "eye", "input": {}}]},
        {"role": "user", "content": [RESULT]},
    ]
    assert send("/v1/messages", max_tokens=5, messages=messages).status_code == 200
    assert [kind for kind, _, _ in seen()] == ["image"]


def test_processor_arguments_reach_the_processor() -> None:
    frames = [picture(seed=seed).quantize() for seed in range(6)]
    film = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    video = {"type": "video_url", "video_url": {"url": data_url(film, "video/gif")}}
    reply = send(
        messages=turn(image_part(URL), video),
        mm_processor_kwargs={"side": 10},
        media_io_kwargs={"video": {"num_frames": 2}},
    )
    assert seen() == [("image", 5, 4), ("video", 10, 4)]
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["multimodal_tokens"] == {"image": 4, "video": 4}


def test_tokenize_and_render_include_placeholders() -> None:
    messages = turn(TEXT, image_part(URL))
    counted = send("/tokenize", messages=messages).json()
    rendered = send(f"{CHAT}/render", messages=messages).json()
    assert counted["count"] == len(rendered["token_ids"]) == len("user:\nab\nassistant:") + 4
    assert counted["tokens"] == rendered["token_ids"]
    (placeholder,) = rendered["features"]["mm_placeholders"]["image"]
    assert placeholder == {"offset": 5, "length": 4}
    assert len(bytes.fromhex(rendered["features"]["mm_hashes"]["image"][0])) == 32


SOUND = base64.b64encode(wav(np.zeros((10, 1), np.int16), rate=0)).decode()


@pytest.mark.parametrize(
    ("part", "status", "param", "words"),
    [
        (image_part(data_url(b"<svg xmlns='x'></svg>")), 400, "image_url", "an SVG, which is not supported"),
        (image_part(data_url(file_of(picture(60, 60))[:400])), 400, "image_url", "broken or truncated"),
        (image_part("data:image/png;base64,####"), 400, "image_url", "invalid base64"),
        (image_part("data:image/png,abc"), 400, "image_url", "a data: url must look like"),
        (image_part("file:///etc/passwd"), 422, "image_url", "Cannot load local files without"),
        (image_part("ftp://x/y.png"), 422, "image_url", "does not start with http:"),
        (image_part("http://127.0.0.1:1/y.png"), 422, "image_url", "private, local or otherwise special"),
        (image_part("http://[::ffff:169.254.169.254]/"), 422, "image_url", "private, local or otherwise"),
        ({"type": "image_url", "image_url": {"url": None}}, 400, "image_url", "needs a `url`"),
        ({"type": "image_url", "uuid": "gone"}, 400, "image_url", "nothing is cached for the uuid 'gone'"),
        ({"type": "image_pil", "image_pil": "x"}, 400, "image_pil", "which only LLM.chat supports"),
        ({"type": "input_audio", "input_audio": {"data": SOUND}}, 400, "input_audio", "1 channels and 0 Hz"),
        ({"type": "video_url", "video_url": {"url": URL[:60]}}, 400, "video_url", "base64|broken"),
    ],
)
def test_invalid_media_is_refused_with_its_position(part: Any, status: int, param: str, words: str) -> None:
    error = refused(send(messages=turn(TEXT, part)), status)
    assert error["message"].startswith("messages[0].content[1]: ")
    assert any(word in error["message"] for word in words.split("|")), error
    kind = "UnprocessableEntityError" if status == 422 else "BadRequestError"
    assert (error["type"], error["param"]) == (kind, param)
    assert send(messages=turn(TEXT)).status_code == 200


def test_image_limit_and_text_only_models() -> None:
    two = turn(image_part(URL), image_part(URL))
    error = refused(chat(engine_with_media(media({"image": 1})), messages=two))
    limit_message = "At most 1 image(s) may be provided in one prompt."
    assert error["message"] == f"{limit_message} Set `--limit-mm-per-prompt` to increase this limit."
    assert "is not a multimodal model" in refused(chat(messages=two))["message"]
    assert "cannot be cut" in refused(send(messages=two, truncate_prompt_tokens=8))["message"]
    beams = send(messages=two, use_beam_search=True, n=2, max_tokens=2).json()
    assert [choice["message"]["content"] for choice in beams["choices"]] == ["!!", "!H"]


def test_slow_media_blocks_no_other_request_and_ends_with_its_client() -> None:
    """Twenty fetches never end; a request behind them is answered. Then their clients disconnect."""

    async def go(url: str, requests: list[Any]) -> None:
        engine = engine_with_media(
            media(allowed_media_domains=("127.0.0.1",), env={"image_fetch_timeout": 300.0})
        )
        application, disconnect = Application(engine, make_settings({})), asyncio.Event()

        def ask(path: str) -> Coroutine[Any, Any, int]:
            return post(application, CHAT, {"messages": turn(image_part(url + path))}, disconnect)

        slow = [asyncio.create_task(ask("/drips")) for _ in range(20)]
        async with asyncio.timeout(60):
            while sum(path == "/drips" for path, _ in requests) < 20:
                await asyncio.sleep(0.01)
            assert await ask("/image.png") == 200
            assert len(application.api.running_requests) == 20
            disconnect.set()
            assert await asyncio.gather(*slow) == [499] * 20
        assert len(engine.seen) == 1 and not application.api.running_requests

    with hostile_server() as server:
        asyncio.run(go(server.url, server.requests))
