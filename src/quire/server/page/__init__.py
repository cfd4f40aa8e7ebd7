"""The web page at `/`: a chat and a live view of the engine, from static files and one event stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from quire.errors import EngineError
from quire.frontend.engine import AsyncEngine

TICK_S = 0.25
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser caches files but revalidates them, so that modules of two versions are never mixed.
    "Cache-Control": "no-cache",
}
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Asset:
    """A static file of the web page, held in memory with its media type and its HTTP ETag."""

    content: bytes
    media_type: str
    etag: str


def read_assets(folder: Path) -> dict[str, Asset]:
    """Return the folder's files of the types in `TYPES`, by file name. Files of other types are never
    served."""
    assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in TYPES:
            content = path.read_bytes()
            assets[path.name] = Asset(content, TYPES[path.suffix], f'"{sha256(content).hexdigest()[:16]}"')
    return assets


ASSETS = read_assets(Path(__file__).parent)
# Paths without secrets: a browser must load them before it can ask the user for the API key.
OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in ASSETS)})


class SnapshotFeed:
    """Stream of server-sent events for the web page: a snapshot of the engine's state every `TICK_S` seconds.
    All listeners share one snapshot, and without listeners none is taken."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._tick = -1
        self._event = b""
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End every stream, so that a server that waits for its open requests can stop."""
        self._closed.set()

    async def listen(self) -> AsyncIterator[bytes]:
        while not self._closed.is_set():
            yield self._latest()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), TICK_S - self._clock() % TICK_S)

    def _latest(self) -> bytes:
        tick = int(self._clock() / TICK_S)
        if tick != self._tick:
            self._tick = tick
            # msgspec writes NaN as null, which JSON.parse can read.
            self._event = b"data: " + msgspec.json.encode(self._snapshot()) + b"\n\n"
        return self._event

    def _snapshot(self) -> dict[str, Any]:
        try:
            return self._engine.snapshot()
        except EngineError as error:
            return {"healthy": False, "problem": str(error)}


def add_page(app: FastAPI, engine: AsyncEngine) -> SnapshotFeed:
    """Add the page's routes; close the returned feed when the server begins to shut down."""
    feed = SnapshotFeed(engine)

    async def index(request: Request) -> Response:
        return respond(request, ASSETS["index.html"])

    async def file(request: Request, name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404)
        return respond(request, ASSETS[name])

    async def events() -> StreamingResponse:
        return StreamingResponse(feed.listen(), media_type="text/event-stream", headers=STREAM_HEADERS)

    app.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/page/events", events, methods=["GET"], include_in_schema=False)
    app.add_api_route("/page/{name}", file, methods=["GET", "HEAD"], include_in_schema=False)
    return feed


def respond(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    # The header may hold several tags, and a proxy may have marked the tag as weak.
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
