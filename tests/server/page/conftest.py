"""A small server with the page, an engine that follows a script, and a real browser."""

import asyncio
import base64
import gc
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from random import Random
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from quire.errors import EngineError
from quire.server import page
from quire.server.page import OPEN_PATHS, add_page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu", "--headless=new", "--no-first-run"]
CHROMIUM_ARGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
DESKTOP = {"width": 1280, "height": 800}

MARKDOWN = """\
A linked list is reversed by turning each `next` pointer around, **one node at a time**:

```python
def reverse(head: Node | None) -> Node | None:
    before = None
    while head:
        head.next, before, head = before, head, head.next
    return before
```

Why it works:

1. `before` is the part already reversed
2. `head` is the first node still to turn
   - it moves on by one each time
   - the loop ends when it is *empty*
3. every node is visited once, so the time is linear
"""
INJECTION = (
    '<img src=x onerror="window.hit=1"> <script>window.hit=1</script> **<b>bold</b>** [x](javascript:hit=1)'
)
ANSWERS = {
    "How is a linked list reversed?": MARKDOWN,
    "inject": INJECTION,
    "endless": "Line.\n\n" * 10_000,
}


class ScriptedEngine:
    """Engine whose numbers change with each snapshot."""

    def __init__(self) -> None:
        self.num_snapshots = 0
        self.error: EngineError | None = None
        self.changes: dict[str, Any] = {}
        self.cells = block_map(Random(7))

    def snapshot(self) -> dict[str, Any]:
        self.num_snapshots += 1
        if self.error:
            raise self.error
        tick = self.num_snapshots
        return {
            "model": "example-model-1B-instruct",
            "version": "0.1.0",
            "uptime_s": 4000.0 + tick / 4,
            "healthy": True,
            "running": 12 + tick % 9,
            "waiting": 3,
            "max_num_seqs": 256,
            "kv_usage": 0.4375,
            "num_blocks": 9472,
            "block_size": 16,
            "blocks": base64.b64encode(self.cells).decode(),
            "prompt_tok_s": 2100 + 1500 * math.sin(tick / 11) * math.sin(tick / 3),
            "generation_tok_s": 940 + 320 * math.sin(tick / 40) + 60 * math.sin(tick / 5),
            "ttft_ms": {"p50": 41.3, "p90": 118.0, "p99": 263.0},
            "itl_ms": {"p50": 8.1, "p90": 11.6, "p99": 14.2},
            "prefix_hit_rate": 0.628,
            "preemptions": 2,
            "requests_finished": 1843,
            "targets": "first token 500 ms: 97.5% good, 46 late first token",
            "max_model_len": 8192,
            **self.changes,
        }


def block_map(random: Random) -> bytes:
    """Return runs of blocks, as requests of different lengths leave them."""
    cells = b"\3" * 60
    while len(cells) < 2048:
        state = random.choices(range(4), weights=[30, 22, 40, 8])[0] if len(cells) < 1500 else 0
        cells += bytes([state]) * random.randint(3, 60)
    return cells[:2048]


class Site:
    """Server on its own thread, with the page and a fake chat route that records request bodies."""

    def __init__(self, key: str | None = None, port: int = 0) -> None:
        self.engine = ScriptedEngine()
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self._num_aborted = 0
        self.app = FastAPI()
        self.feed = add_page(self.app, self.engine)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.middleware("http")(self.guard)
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", lifespan="off"))
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self.socket])

    def stop(self) -> None:
        """Drain and stop, as a supervisor would."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.feed.close)
            self.server.should_exit = True
            self.thread.join(60)
        assert not self.thread.is_alive(), "open event streams keep the server from stopping"

    async def guard(self, request: Request, call_next: Callable[[Request], Any]) -> Response:
        sent = request.headers.get("authorization")
        if self.key and request.url.path not in OPEN_PATHS and sent != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        response: Response = await call_next(request)
        return response

    @property
    def num_aborted(self) -> int:
        """Return the number of aborted answers. An answer that is cut during a send ends when it is
        collected."""
        gc.collect()
        return self._num_aborted

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        content = body["messages"][-1]["content"]
        question = content if isinstance(content, str) else content[-1].get("text", "")
        if question == "refuse":
            return JSONResponse({"error": {"message": "max_tokens is too large."}}, 400)
        if question == "overload":
            return Response("busy", 503)
        return StreamingResponse(self.answer(question), media_type="text/event-stream")

    async def answer(self, question: str) -> AsyncIterator[str]:
        text = ANSWERS.get(question, "The sky is blue.")
        pieces = [text[i : i + 6] for i in range(0, len(text), 6)]
        try:
            yield chunk({"role": "assistant", "content": ""}, 0)
            for num_tokens, piece in enumerate(pieces, 1):
                await asyncio.sleep(0.02 if question == "endless" or len(pieces) < 9 else 0.001)
                if question == "fail" and num_tokens == 3:
                    yield 'data: {"error": {"message": "The engine stopped."}}\n\ndata: [DONE]\n\n'
                    return
                if question == "cut" and num_tokens == 3:
                    return
                yield chunk({"content": piece}, num_tokens, "stop" if num_tokens == len(pieces) else None)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self._num_aborted += 1
            raise


def chunk(delta: dict[str, str], num_tokens: int, reason: str | None = None) -> str:
    usage = {"prompt_tokens": 20, "completion_tokens": num_tokens, "total_tokens": 20 + num_tokens}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n"


def wait_until(done: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait until `done()` is true; another thread makes it so."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def rare_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the numbers of the engine once, and then every minute: drawing them takes half of the time."""
    monkeypatch.setattr(page, "TICK_S", 60.0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """Start sites; all are stopped at the end of the test."""
    sites: list[Site] = []

    def start(**settings: Any) -> Site:
        sites.append(Site(**settings))
        return sites[-1]

    yield start
    for site in sites:
        site.stop()


# Not session-scoped: while playwright is open this thread has a running event loop, and asyncio.run fails.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    if not os.path.exists(CHROMIUM):
        pytest.skip(f"no Chromium at {CHROMIUM}; install it or set CHROMIUM to its path")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


def new_page(browser: Any, **settings: Any) -> Any:
    """Open a page. `page.requests` and `page.problems` record the browser's requests and console messages."""
    context = browser.new_context(**{"viewport": DESKTOP, **settings})
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.on("request", lambda request: page.requests.append(request.url))
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    return page


@pytest.fixture(scope="module")
def usual_page(browser: Any) -> Any:
    """Return the page that tests without settings share: opening one takes most of the time of a test. What
    a site stores is not visible to the next, which has another port."""
    return new_page(browser)


@pytest.fixture
def open_page(browser: Any, usual_page: Any) -> Iterator[Callable[..., Any]]:
    """Open a site, in a page of its own if there are settings for it."""
    pages: list[Any] = []

    def open_site(site: Any, **settings: Any) -> Any:
        is_usual = not settings and usual_page not in pages
        page = usual_page if is_usual else new_page(browser, **settings)
        pages.append(page)
        page.requests, page.problems = [], []
        page.goto(site.url)
        return page

    yield open_site
    for opened in pages:
        if opened is usual_page:
            opened.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
            opened.goto("about:blank")
        else:
            opened.context.close()
