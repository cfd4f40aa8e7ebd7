"""Denial of service by routes that need no model (CVE-2025-62426 and its class): a long text is refused or
tokenized off the event loop, and only a limited number of texts is tokenized at once."""

import asyncio
import threading
from typing import Any

import pytest
from ask import CHAT, COMPLETIONS, ask, client_of, refused
from fake_engine import FakeEngine

from quire.server.app import Application
from quire.server.settings import make_settings
from quire.server.tokens import render, routes
from quire.text.tokenizer import Tokenizer

LIMIT = 512 * 256
"""Maximum characters of a text for the context length of the fake engine."""
LONG = "x" * (1 << 15)


def talk(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * (LIMIT + 1)}),
        ("/tokenize", talk("x" * LIMIT)),
        ("/v1/messages/count_tokens", {"model": "fake", **talk("x" * LIMIT)}),
        (f"{CHAT}/render", talk("x" * LIMIT)),
        (f"{COMPLETIONS}/render", {"prompt": "x" * (LIMIT + 1)}),
    ],
)
def test_text_too_long_for_the_context_is_not_tokenized(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: pytest.fail("it was tokenized"))
    reply = ask("POST", path, engine=engine, json=body)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert "512" in message and "max_model_len" in message
    if path == "/tokenize":
        assert f"at most {LIMIT}" in message and "send it in parts" in message


def test_longest_allowed_text_is_counted() -> None:
    assert ask("POST", "/tokenize", json={"prompt": "x" * LIMIT}).json()["count"] == LIMIT


def test_too_many_token_ids_are_refused() -> None:
    most = 1 << 17
    error = refused(ask("POST", "/detokenize", json={"tokens": [97] * (most + 1)}))
    assert error["param"] == "tokens" and f"at most {most}" in error["message"]
    assert "in parts" in error["message"]
    assert len(ask("POST", "/detokenize", json={"tokens": [97] * most}).json()["prompt"]) == most


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
        ("/tokenize", {**talk(LONG), "return_token_strs": True}),
        ("/detokenize", {"tokens": [97] * len(LONG)}),
        (f"{COMPLETIONS}/render", {"prompt": ["x" * 400] * 50, "return_token_offsets": True}),
    ],
)
def test_long_token_lists_are_handled_off_the_event_loop(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    engine = FakeEngine()

    def noting(work: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return work(*args, **options)

        return noted

    for name in ("convert_ids_to_tokens", "decode", "encode", "offsets"):
        monkeypatch.setattr(Tokenizer, name, noting(getattr(Tokenizer, name)))
    for module in (routes, render):
        monkeypatch.setattr(module, "json_response", noting(module.json_response))
    assert ask("POST", path, engine=engine, json=body).status_code == 200
    assert threads and threading.get_ident() not in threads


def test_long_texts_are_serialized_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """If long texts were tokenized in parallel, one client could occupy all threads, and prompts of others
    would wait."""
    application = Application(FakeEngine(), make_settings({}))
    begun, over, lock, running, most = threading.Semaphore(0), threading.Event(), threading.Lock(), 0, 0
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal running, most
        if len(text) < len(LONG):
            return encode(self, text, add_special_tokens)
        with lock:
            running += 1
            most = max(most, running)
        begun.release()
        assert over.wait(60)
        with lock:
            running -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def go() -> list[int]:
        async with client_of(application.asgi) as client:
            long = [
                asyncio.create_task(client.post("/tokenize", json={"prompt": LONG + str(number)}))
                for number in range(6)
            ]
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=60)
            short = await client.post("/tokenize", json={"prompt": "short"})
            prompt = await client.post(COMPLETIONS, json={"prompt": "short", "max_tokens": 1})
            over.set()
            return [reply.status_code for reply in (short, prompt, *await asyncio.gather(*long))]

    assert asyncio.run(go()) == [200] * 8
    assert most == 2
