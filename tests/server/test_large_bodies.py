"""Tests of large bodies: parsed off the event loop, and refused if they hold too many values."""

import asyncio
import importlib
import itertools
import json
import threading
from typing import Any

import httpx
import pytest
from ask import client_of, fetch, refused
from fake_engine import FakeEngine

from quire.server.app import Application
from quire.server.http import fast_path
from quire.server.http.fast_path import may_have_surrogates
from quire.server.openai.work_size import num_chars
from quire.server.settings import make_settings

ENGINE = FakeEngine()
APPLICATION = Application(ENGINE, make_settings({}))
LONG = 'a, [b]: {c} \\" ' * (fast_path._LARGE // 12)
"""Text in which no character counts as a value."""


def client() -> httpx.AsyncClient:
    return client_of(APPLICATION.asgi)


def post(path: str, content: str | bytes) -> httpx.Response:
    return fetch(
        APPLICATION.asgi, "POST", path, content=content, headers={"content-type": "application/json"}
    )


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


async def test_other_requests_run_while_a_large_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, read = threading.Event(), threading.Event(), fast_path._parse_large

    def parse_slowly(*args: Any) -> Any:
        begun.set()
        assert over.wait(60)
        return read(*args)

    monkeypatch.setattr(fast_path, "_parse_large", parse_slowly)
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


MANY = 4000
BIAS = {"logit_bias": {str(number): number % 7 for number in range(MANY)}}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(MANY)]
ITEMS = [{"role": "user", "content": "hi"}] * MANY
PARAMS, INPUTS = "quire.data.params:SamplingParams", "quire.frontend.inputs:InputProcessor"
OPENAI = "quire.server.openai"


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/v1/completions", {"prompt": "a"} | BIAS, "quire.server.http.fast_path:_parse_large"),
        ("/v1/completions", {"prompt": "a"} | BIAS, f"{PARAMS}.from_optional"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [64] * MANY}, f"{INPUTS}.check"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["ab" * 200] * 100}, f"{INPUTS}.check"),
        ("/v1/chat/completions", {"messages": MESSAGES} | BIAS, f"{PARAMS}.from_optional"),
        ("/v1/chat/completions", {"messages": MESSAGES * MANY}, f"{OPENAI}.prompts:part_media"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"},
            f"{OPENAI}.chat:read_tools",
        ),
        ("/v1/responses", {"input": ITEMS}, "quire.server.responses.routes:read_items"),
        ("/v1/messages", {"messages": MESSAGES * MANY, "max_tokens": 1}, f"{OPENAI}.prompts:part_media"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": BIAS}, f"{PARAMS}.from_optional"),
    ],
)
def test_work_on_many_values_is_done_in_a_thread(
    path: str, body: dict[str, Any], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches work on the event loop that grows with what a client sends: /health and all other requests wait
    for it."""
    module, _, name = work.partition(":")
    threads: set[threading.Thread] = set()
    owner: Any = importlib.import_module(module)
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return real(*((args[1:]) if name == "from_optional" else args), **kwargs)

    monkeypatch.setattr(owner, name, classmethod(record) if name == "from_optional" else record)
    assert post(path, json.dumps(body)).status_code in (200, 400)
    assert threads and threading.main_thread() not in threads


def test_values_are_counted_up_to_a_limit() -> None:
    """Catches a count of all values on the event loop, to decide whether there are many."""
    assert num_chars({} for _ in itertools.repeat(0)) >= num_chars([1] * MANY) > num_chars(["a" * 1000])


def test_body_of_a_disconnected_client_is_not_parsed() -> None:
    """Catches a flood of requests from clients that are gone when the server comes to them."""

    class Cycle:
        disconnected = True
        statuses: list[int] = []

        async def receive(self) -> dict[str, Any]:
            return {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}

        async def send(self, message: dict[str, Any]) -> None:
            if "status" in message:
                self.statuses.append(message["status"])

    cycle, before = Cycle(), len(ENGINE.seen)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"15")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(APPLICATION.asgi(scope, cycle.receive, cycle.send))
    assert cycle.statuses == [499] and len(ENGINE.seen) == before
