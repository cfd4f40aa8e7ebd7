"""Forged client addresses: X-Forwarded-For and similar headers could open routes meant for this machine, or
put a false address into the log. Quire decides nothing by addresses, and trusts these headers only from a
proxy on 127.0.0.1."""

import asyncio
import logging
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeEngine

from quire.server.http.sockets import bind
from quire.server.main import serve
from quire.server.settings import make_settings

FALSE = "203.0.113.7"
HEADERS = {"x-forwarded-for": FALSE, "x-real-ip": FALSE, "forwarded": f"for={FALSE}"}
PATIENCE_S = 60


class Kept(logging.Handler):
    """Log handler that records the addresses of the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        self.addresses.append(str(record.args[0]).rpartition(":")[0])


@pytest.fixture
def log() -> Iterator[Kept]:
    kept, access = Kept(), logging.getLogger("uvicorn.access")
    yield kept
    access.removeHandler(kept)


def statuses(kept: Kept, source: str, *paths: str) -> list[int]:
    """Return the statuses of GET requests with forged addresses, from a client at the address `source`."""
    settings = make_settings({"host": "127.0.0.1", "port": 0, "api_key": ["secret"]})

    async def go() -> list[int]:
        listening, stop, ready = bind(settings.http), asyncio.Event(), asyncio.Event()

        def on_serving(_: object) -> None:
            logging.getLogger("uvicorn.access").addHandler(kept)
            ready.set()

        serving = asyncio.create_task(
            serve(settings, FakeEngine(), [listening], stop=stop, on_serving=on_serving)
        )
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        transport = httpx.AsyncHTTPTransport(local_address=source)
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(transport=transport, base_url=base, timeout=PATIENCE_S) as client:
            answers = [(await client.get(path, headers=HEADERS)).status_code for path in paths]
        stop.set()
        await asyncio.wait_for(serving, PATIENCE_S)
        return answers

    return asyncio.run(go())


def test_forwarded_address_does_not_replace_a_key(log: Kept) -> None:
    assert statuses(log, "127.0.0.1", "/health", "/v1/models", "/load") == [200, 401, 401]
    assert log.addresses == [FALSE] * 3, "a proxy on this machine is trusted"


def test_access_log_has_the_address_of_the_connection(log: Kept) -> None:
    assert statuses(log, "127.0.0.2", "/health", "/v1/models") == [200, 401]
    assert log.addresses == ["127.0.0.2"] * 2
