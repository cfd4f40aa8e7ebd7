"""Tests of the page's routes: static files, and the event stream of snapshots."""

import asyncio
import gc
import json
import threading
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire.server.page as page
from quire.errors import EngineDead

TIMEOUT_S = 60.0
"""Limit after which a hanging test fails."""


def test_index_has_content_type_and_security_policy(serve: Callable[..., Any]) -> None:
    """Catches a page without its security policy, or with a type browsers would guess."""
    answer = httpx.get(serve().url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_asset_has_its_content_type(serve: Callable[..., Any]) -> None:
    """Catches a module served as text/plain, which browsers refuse."""
    url = serve().url
    types = {name: httpx.get(f"{url}/page/{name}").headers["content-type"] for name in page.ASSETS}
    for name, result in types.items():
        assert result.startswith(page.TYPES[Path(name).suffix]), name
    assert {"page.js", "page.css", "icon.svg"} <= types.keys()


def test_matching_etag_is_304(serve: Callable[..., Any]) -> None:
    """Catches a tag that is never compared, and one that matches anything."""
    url = serve().url + "/page/page.js"
    tag = httpx.get(url).headers["etag"]
    again = httpx.get(url, headers={"If-None-Match": f"W/{tag}"})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(url, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["__init__.py", "../__init__.py", "..%2f..%2ferrors.py", "%2e%2e/main.py", "/etc/passwd", "nothing.js"],
)
def test_other_files_are_404(serve: Callable[..., Any], name: str) -> None:
    """Catches path traversal and Python source on the web."""
    assert httpx.get(f"{serve().url}/page/{name}").status_code == 404


def test_page_routes_are_not_in_the_openapi_document(serve: Callable[..., Any]) -> None:
    """Catches the page's routes in the OpenAPI document, where they would be fuzzed as API."""
    assert list(httpx.get(serve().url + "/openapi.json").json()["paths"]) == ["/v1/chat/completions"]


def test_assets_refer_only_to_existing_assets() -> None:
    """Catches a renamed module or an address outside of this server."""
    for name, asset in page.ASSETS.items():
        text = asset.content.decode()
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "").replace(
            "*/", ""
        ), name
        for quoted in text.split('"')[1::2]:
            if quoted.startswith(("./", "page/")) and quoted != "page/events":
                assert quoted.rpartition("/")[2] in page.ASSETS, f"{name}: {quoted}"


def test_assets_are_package_data() -> None:
    """Catches assets that the build leaves out: an installed server would have no page."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert "server/page/*" in project["tool"]["setuptools"]["package-data"]["quire"]


class CountingEngine:
    def __init__(self) -> None:
        self.num_snapshots = 0

    def snapshot(self) -> dict[str, Any]:
        self.num_snapshots += 1
        return {"number": self.num_snapshots, "nan": float("nan")}


def decoded(event: bytes) -> Any:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    return json.loads(event[6:])


async def take(stream: AsyncIterator[bytes], num_events: int) -> list[Any]:
    return [decoded(await anext(stream)) for _ in range(num_events)]


def test_listeners_share_one_snapshot_per_tick() -> None:
    """Catches a snapshot per listener: a hundred open pages would slow the engine down."""
    engine, now = CountingEngine(), 0.0
    feed = page.SnapshotFeed(engine, clock=lambda: now)

    async def listen() -> None:
        nonlocal now
        streams = [feed.listen() for _ in range(20)]
        for number in (1, 1, 2, 2, 3):
            now = (number - 1) * page.TICK_S
            events = await asyncio.gather(*(anext(stream) for stream in streams))
            assert [decoded(event)["number"] for event in events] == [number] * len(streams)

    asyncio.run(listen())
    assert engine.num_snapshots == 3


def test_nan_becomes_null() -> None:
    """Catches NaN in the stream, which makes JSON.parse throw."""
    assert asyncio.run(take(page.SnapshotFeed(CountingEngine()).listen(), 1))[0]["nan"] is None


def test_dead_engine_is_an_event() -> None:
    """Catches a page that shows "connection lost" when the engine has failed."""

    class DeadEngine:
        def snapshot(self) -> dict[str, Any]:
            raise EngineDead("the core has died")

    events = asyncio.run(take(page.SnapshotFeed(DeadEngine()).listen(), 2))
    assert events == [{"healthy": False, "problem": "the core has died"}] * 2


def test_closing_the_feed_ends_open_streams() -> None:
    """Catches a server that can never drain because a page is open."""

    async def listen() -> list[bytes]:
        feed = page.SnapshotFeed(CountingEngine())
        stream = feed.listen()
        first = await anext(stream)
        asyncio.get_running_loop().call_soon(feed.close)
        return [first, *[event async for event in stream]]

    assert len(asyncio.run(asyncio.wait_for(listen(), TIMEOUT_S))) == 1


def test_stream_ends_when_the_client_disconnects(
    serve: Callable[..., Any], until: Callable[..., None]
) -> None:
    """Catches a stream that outlives its client and keeps taking snapshots of the engine."""
    site, ended = serve(), threading.Event()
    listen = site.feed.listen

    async def listen_and_set() -> AsyncIterator[bytes]:
        try:
            async for event in listen():
                yield event
        finally:
            ended.set()

    site.feed.listen = listen_and_set
    with httpx.stream("GET", site.url + "/page/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["num_blocks"] == 9472
        assert not ended.is_set()

    def has_ended() -> bool:
        gc.collect()  # A stream that is cut while an event is being sent ends when it is collected.
        return ended.is_set()

    until(has_ended)
