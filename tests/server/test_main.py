"""Tests of a real server on a loopback port: disconnects, the drain, sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, until
from fake_engine import FakeEngine

from quire.config.env import Env
from quire.errors import ConfigError
from quire.server.http.sockets import bind, check_is_free
from quire.server.main import serve
from quire.server.settings import make_settings

TIMEOUT_S = 60
"""Limit after which a hanging test fails."""


@asynccontextmanager
async def served(
    engine: FakeEngine, *, env: Env | None = None, **overrides: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Event]]:
    """Serve within this context, or until the event is set; the server must then stop by itself."""
    settings = make_settings({"host": "127.0.0.1", "port": 0, **overrides}, env=env)
    listening, stop = bind(settings.http), asyncio.Event()
    serving = asyncio.create_task(serve(settings, engine, [listening], stop=stop))
    uds = settings.http.uds
    base = "http://test" if uds else f"http://127.0.0.1:{listening.getsockname()[1]}"
    transport = httpx.AsyncHTTPTransport(uds=uds)
    async with httpx.AsyncClient(transport=transport, base_url=base, timeout=TIMEOUT_S) as client:
        yield client, stop
    stop.set()
    await asyncio.wait_for(serving, TIMEOUT_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_client_disconnect_frees_the_engine(stream: bool, prompt: Any) -> None:
    engine = FakeEngine("x" * 500, step_s=0.02, max_model_len=100_000)
    async with served(engine) as (client, _):
        body = {"prompt": prompt, "max_tokens": 90_000, "ignore_eos": True, "stream": stream}
        asking = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await until(lambda: engine.num_in_flight == (2 if isinstance(prompt, list) else 1))
        asking.cancel()
        await until(lambda: engine.num_in_flight == 0)
        assert (await client.get("/health")).status_code == 200
    assert len(engine.aborted) == (2 if isinstance(prompt, list) else 1)


async def test_drain_lets_running_requests_finish() -> None:
    engine = FakeEngine("abcdef", step_s=0.03)
    async with served(engine) as (client, stop):
        asking = asyncio.create_task(client.post(CHAT, json={"messages": MESSAGES, "stream": True}))
        await until(lambda: engine.num_in_flight == 1)
        stop.set()
        text = (await asking).text
    assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in text and engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_cut_by_the_drain_get_the_reason(stream: bool) -> None:
    engine = FakeEngine("x" * 5000, step_s=0.05, max_model_len=10_000)
    async with served(engine, shutdown_timeout=0.2) as (client, stop):
        body = {"messages": MESSAGES, "stream": stream}
        asking = asyncio.create_task(client.post(CHAT, json=body))
        await until(lambda: engine.num_in_flight == 1)
        stop.set()
        response = await asking
    assert "shutting down" in response.text and len(engine.aborted) == 1
    assert response.status_code == (200 if stream else 500)
    assert not stream or response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("seconds", ["0.05", "600"])
async def test_idle_connections_are_closed_after_the_time_of_the_environment(seconds: str) -> None:
    env = Env.read({"HOME": "/", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": seconds})
    async with served(FakeEngine(), env=env) as (client, _):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        closing = asyncio.ensure_future(reader.read())
        await asyncio.wait((closing,), timeout=TIMEOUT_S if seconds == "0.05" else 0.5)
        assert closing.done() == (seconds == "0.05")
        writer.close()


async def test_open_page_does_not_delay_shutdown() -> None:
    """The event stream of the page never ends by itself."""
    async with (
        served(FakeEngine()) as (client, stop),
        client.stream("GET", "/page/events") as response,
    ):
        assert response.status_code == 200
        stop.set()
        await response.aread()


async def test_unix_socket_and_root_path(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with served(FakeEngine(), uds=path, root_path="/api", api_key=["k"]) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": "Bearer k"})).status_code == 200
        # A proxy may also keep the prefix in the path.
        assert (await client.get("/api/health")).status_code == 200
        assert (await client.get("/api/v1/models")).status_code == 401
        assert (await client.get("/api/v1/models", headers={"authorization": "Bearer k"})).status_code == 200
        assert (await client.get("/apiv1/models", headers={"authorization": "Bearer k"})).status_code == 404
        assert (await client.get("/api/api/health")).status_code == 401
    # A socket file that an earlier server left is replaced; one with a listening server is an error.
    listening = bind(make_settings({"uds": path}).http)
    for check in (bind, check_is_free):
        with pytest.raises(ConfigError, match="--uds"):
            check(make_settings({"uds": path}).http)
    listening.close()
    # The check before the start makes no file.
    check_is_free(make_settings({"uds": str(tmp_path / "new")}).http)
    assert not (tmp_path / "new").exists()


def test_port_in_use_is_reported_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind(make_settings({"host": "127.0.0.1", "port": port}).http)


async def test_unreadable_certificates_are_a_config_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    settings = make_settings({"ssl_certfile": missing, "ssl_keyfile": missing})
    with pytest.raises(ConfigError, match="ssl_certfile"):
        await serve(settings, FakeEngine(), [])
