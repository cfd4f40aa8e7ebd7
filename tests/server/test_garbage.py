"""Tests that a request leaves no reference cycle that keeps its body until the garbage collector runs."""

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from fast_core import FastCore, engine_over
from tiny_text import text_model

from quire.server.main import serve
from quire.server.settings import make_settings
from quire.text.tokenizer import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
OWN_PACKAGES = ("quire.", "uvicorn.")
_IDLE = 6
"""Number of tasks of an idle server, with the one that counts them."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TALK = {"messages": [{"role": "user", "content": "ab" * 100}], "max_tokens": 3, "ignore_eos": True}
TEXT = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}
SHAPED = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": (CHAT, TALK),
    "a stream": (CHAT, TALK | {"stream": True}),
    "several": (CHAT, TALK | {"stream": True, "n": 2, "logprobs": True}),
    "texts": (COMPLETION, TEXT | {"prompt": ["ab", "ba"], "stream": True}),
    "prompts in order": (COMPLETION, TEXT | {"prompt": ["ab", "ba"], "echo": True}),
    "a stop": (COMPLETION, TEXT | {"stop": "zz", "stream": True}),
    "messages": ("/v1/messages", TALK | {"stream": True}),
    "a response": ("/v1/responses", {"input": "ab", "max_output_tokens": 16, "stream": True}),
    "tokens": ("/tokenize", {"prompt": "ab"}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no JSON": (CHAT, {"messages": 5}),
    "wrong": (COMPLETION, TEXT | {"n": -1}),
    "no grammar": (CHAT, TALK | SHAPED),
    "too long": (COMPLETION, TEXT | {"prompt": "a" * 3000}),
    "no model": (CHAT, TALK | {"model": "nobody"}),
}


class Serving:
    """Server and engine core in threads of this process."""

    def __init__(self, folder: Path) -> None:
        self._core = FastCore(f"ipc://{folder}/core", token_id=50, max_model_len=1000)
        self._over = False
        self._stop = asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ready = threading.Event()
        tokenizer = load_tokenizer(text_model(folder).path, "hf")
        self._engine = engine_over(f"ipc://{folder}/core", vocab=340, max_model_len=1000, tokenizer=tokenizer)
        self._loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._step, self._serve)]
        for thread in self._threads:
            thread.start()
        assert self._ready.wait(60)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self._listener.getsockname()[1]}", timeout=60)

    def _step(self) -> None:
        while not self._over:
            self._core.listen()
            self._core.step()
            self._core.beat()
        self._core.socket.close()

    def _serve(self) -> None:
        async def serving() -> None:
            self._engine.start()
            await self._engine.ready()
            settings = make_settings({"disable_uvicorn_access_log": True})
            await serve(
                settings,
                self._engine,
                [self._listener],
                stop=self._stop,
                announce=False,
                on_serving=lambda _: self._ready.set(),
            )
            self._engine.close()

        self._loop.run_until_complete(serving())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def wait_until_idle(self) -> None:
        """Wait until no request and no task is left."""

        async def quiet() -> None:
            while self._engine.num_in_flight or len(asyncio.all_tasks(self._loop)) > _IDLE:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)

        self.call(quiet())

    def close(self) -> None:
        self.client.close()
        self._over = True
        self._threads[0].join(60)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._threads[1].join(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    started = Serving(tmp_path_factory.mktemp("garbage"))
    gc.collect()
    gc.freeze()  # objects from before the test are not examined again
    yield started
    gc.unfreeze()
    started.close()


def garbage_of(server: Serving, ask: Callable[[], None]) -> list[str]:
    """Return the classes of our objects that the second of two requests left as garbage."""
    for _ in range(2):
        server.wait_until_idle()
        gc.collect()
        gc.disable()
        ask()
    server.wait_until_idle()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        names = {f"{type(garbage).__module__}.{type(garbage).__qualname__}" for garbage in gc.garbage}
        return [name for name in names if name.startswith(OWN_PACKAGES)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("kind", [*KINDS, *REFUSED])
def test_request_leaves_no_garbage(server: Serving, kind: str) -> None:
    path, body = (KINDS | REFUSED)[kind]

    def ask() -> None:
        reply = server.client.post(path, json=body)
        assert (reply.status_code == 200) == (kind in KINDS), reply.text

    assert not garbage_of(server, ask)


def test_disconnected_client_leaves_no_garbage(server: Serving) -> None:
    def ask() -> None:
        with server.client.stream("POST", CHAT, json=TALK | {"stream": True, "max_tokens": 700}) as reply:
            next(reply.iter_lines())

    assert not garbage_of(server, ask)
