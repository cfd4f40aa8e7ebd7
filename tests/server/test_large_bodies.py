"""Tests of large bodies: parsed off the event loop, and refused if they hold too many values."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from ask import refused
from fake_engine import FakeEngine

from quire.server.app import Application
from quire.server.http import fast_path
from quire.server.http.fast_path import may_have_surrogates
from quire.server.settings import make_settings

ENGINE = FakeEngine()
APPLICATION = Application(ENGINE, make_settings({}))
LONG = 'a, [b]: {c} \\" ' * (fast_path._LARGE // 12)
"""Text in which no character counts as a value."""


def client() -> httpx.AsyncClient:
    transport = httpx.ASGITransport(APPLICATION.asgi, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def post(path: str, content: str | bytes) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client() as http:
            return await http.post(path, content=content, headers={"content-type": "application/json"})

    return asyncio.run(go())


def listed(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


def test_large_bodies_are_answered_like_small_ones() -> None:
    extra = {"note": LONG}
    assert post("/v1/completions", json.dumps({"prompt": "ab", **extra})).status_code == 200
    assert post("/detokenize", json.dumps({"tokens": [64], **extra})).json() == {"prompt": "a"}
    for path, body in (
        ("/v1/completions", {"prompt": 1.5}),
        ("/v1/chat/completions", {}),
        ("/tokenize", {"prompt": [1]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        small, large = (refused(post(path, json.dumps(fields))) for fields in (body, body | extra))
        large["message"] = large["message"].replace("valid array", "valid list")
        assert small == large
    assert refused(post("/v1/completions", '{"a": ' + " " * fast_path._LARGE))["type"] == "Bad Request"
    surrogate = json.dumps({"prompt": "ab", **extra}).replace("ab", "\\ud800")
    assert "lone surrogate U+D800" in refused(post("/v1/completions", surrogate))["message"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (listed("1", fast_path._MAX_VALUES + 2), "values"),
        (listed("[1]", fast_path._MAX_PARTS + 1), "lists, objects and names"),
        ("{" + ",".join(f'"{k}":1' for k in range(fast_path._MAX_PARTS)) + "}", "lists, objects and names"),
    ],
    ids=["values", "lists", "names"],
)
def test_bodies_with_too_many_values_are_refused(value: str, words: str) -> None:
    for path in ("/v1/completions", "/tokenize"):
        error = refused(post(path, '{"prompt":"\\\\","x":' + value + "}"))
        assert words in error["message"] and "may have" in error["message"]


def test_other_requests_run_while_a_large_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, read = threading.Event(), threading.Event(), fast_path._parse_large

    def parse_slowly(*args: Any) -> Any:
        begun.set()
        assert over.wait(60)
        return read(*args)

    monkeypatch.setattr(fast_path, "_parse_large", parse_slowly)

    async def go() -> None:
        body = json.dumps({"prompt": "ab", "note": LONG})
        async with client() as http, asyncio.timeout(60):
            sent = {"content": body, "headers": {"content-type": "application/json"}}
            large = asyncio.create_task(http.post("/v1/completions", **sent))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": "ab"})).status_code == 200
            over.set()
            assert (await large).status_code == 200

    asyncio.run(go())


@pytest.mark.parametrize(
    "raw, may",
    [
        (b'"%s"' % (b"A" * 99), False),
        (b'"\\n\\n\\u0041"', False),
        (b'"\\n\\ud83d"', True),
        (b'"%s\\uDC00"' % (b"\\\\" * 200), True),
        (b'"%s"' % (b"\\n" * 200), False),
        (b'"\\\\ud83d"', False),
        (b'"\xed\xa0\x80"', True),
        (b"\\", False),
    ],
)
def test_possible_lone_surrogates_are_detected(raw: bytes, may: bool) -> None:
    """Any number of escapes may come before; an escaped backslash starts none."""
    assert may_have_surrogates(raw) == may
