"""Slow connections and too many connections: a client without a key holds a descriptor for each. They time
out, and their number is bounded."""

import asyncio
import contextlib
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from http_corpus import AUTH, BODY, CHUNKED, LENGTH, get, post
from raw_http import PATIENCE_S, PROBE, Client, RawServer, SlowReader, raw_server

from quire.config.server_sections import HttpSection
from quire.server.http.accept import ConnectionDealer, ConnectionHandle
from quire.server.http.refusals import OpenConnections, RefusalLog, default_max_connections, network_of
from quire.server.http.sockets import bind
from quire.server.main import serve
from quire.server.settings import make_settings

LIMIT_S = 1.0
LOGGER = "quire.server.http.refusals"


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[RawServer]:
    engine = FakeEngine("abcdef", step_s=LIMIT_S / 3)
    limits = {"request_header_timeout": LIMIT_S, "request_body_timeout": LIMIT_S}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.server.http.protocol.LINGER_S", LIMIT_S)
        with raw_server(engine, disable_uvicorn_access_log=True, **limits) as server:
            yield server


def trickle(client: Client, piece: bytes, *, pause_s: float = LIMIT_S / 6) -> None:
    """Send the pieces one by one until the server closes the connection."""
    end = time.monotonic() + PATIENCE_S
    try:
        while True:
            assert time.monotonic() < end, "the connection is never closed"
            client.socket.sendall(piece)
            time.sleep(pause_s)
    except (BrokenPipeError, ConnectionResetError):
        return


def check_timed_out(client: Client, flag: str) -> None:
    (response,) = client.read_all()
    error = json.loads(response.body)["error"]
    assert response.status == error["code"] == 408 and flag in error["message"]


def test_idle_connection_is_closed(impatient_server: RawServer) -> None:
    with impatient_server.connect() as client:
        assert client.is_closed


@pytest.mark.parametrize(
    "half", [b"G", PROBE[:-2], b"\r\n", b"GET /"], ids=["method", "header", "empty", "path"]
)
def test_unfinished_headers_are_408(impatient_server: RawServer, half: bytes) -> None:
    with impatient_server.connect() as client:
        client.send(half)
        check_timed_out(client, "--request-header-timeout")


def test_trickled_headers_are_408(impatient_server: RawServer) -> None:
    """Catches a timer that every byte restarts."""
    with impatient_server.connect() as client:
        client.send(PROBE[:-2])
        trickle(client, b"X-A: b\r\n")


def test_headers_after_an_answer_have_the_same_timeout(impatient_server: RawServer) -> None:
    with impatient_server.connect() as client:
        for _ in range(2):
            client.send(PROBE)
            response = client.read()
            assert response is not None and response.status == 200
        client.send(PROBE[:10])
        check_timed_out(client, "--request-header-timeout")


@pytest.mark.parametrize(
    "half",
    [
        post(LENGTH, b""),
        post(LENGTH, BODY[:-1]),
        post(CHUNKED, b""),
        post(CHUNKED, b"ffffffffffffffff\r\nx"),
        post(CHUNKED, b"5;a=b"),
        post(CHUNKED, b"%x\r\n%b\r\n0\r\nX-A: " % (len(BODY), BODY)),
        post(LENGTH + b"Expect: 100-continue\r\n", b"x"),
    ],
    ids=["no body", "half", "no chunk", "chunk of 2^64 bytes", "chunk extension", "trailer", "expect"],
)
def test_stalled_body_is_408(impatient_server: RawServer, half: bytes) -> None:
    with impatient_server.connect() as client:
        client.send(half)
        if b"Expect" in half:
            assert (response := client.read()) is not None and response.status == 100
        check_timed_out(client, "--request-body-timeout")
    assert impatient_server.engine.num_in_flight == 0


def test_refused_body_times_out(impatient_server: RawServer) -> None:
    with impatient_server.connect() as client:
        client.send(post(b"Content-Length: 1000000\r\n", b"").replace(b"Bearer ", b"Bearer x"))
        response = client.read()
        assert response is not None and response.status == 401
        trickle(client, b"x")


def test_slow_but_steady_body_is_read() -> None:
    """Catches a timeout for a whole body instead of for each wait."""
    limit_s = 3.0
    with raw_server(request_body_timeout=limit_s) as server, server.connect() as client:
        client.send(post(LENGTH, b""))
        for start in range(0, len(BODY), 3):
            time.sleep(1.2 * limit_s / (len(BODY) / 3))
            client.send(BODY[start : start + 3])
        response = client.read()
        assert response is not None and response.status == 200


def test_generation_and_keep_alive_are_not_timed(impatient_server: RawServer) -> None:
    """Catches a timer that runs while the engine generates: the answer takes longer than both limits."""
    body = json.dumps({"prompt": "ab", "max_tokens": 6}).encode()
    with impatient_server.connect() as client:
        started = time.monotonic()
        client.send(post(b"Content-Length: %d\r\n" % len(body), body) + PROBE[:10])
        response = client.read()
        assert response is not None and response.status == 200 and time.monotonic() - started > LIMIT_S
        client.send(PROBE[10:])
        response = client.read()
        assert response is not None and response.status == 200
        time.sleep(2 * LIMIT_S)
        client.send(PROBE)
        response = client.read()
        assert response is not None and response.status == 200


def test_body_that_the_server_does_not_read_is_not_timed() -> None:
    """Catches a 408 for a client that is delayed by the server."""
    body = json.dumps({"prompt": "ab", "max_tokens": 2, "user": "x" * 8_000_000}).encode()
    settings = {"request_body_timeout": LIMIT_S, "middleware": ("raw_http.SlowReader",)}
    assert SlowReader.WAIT_S > 2 * LIMIT_S
    with raw_server(disable_uvicorn_access_log=True, **settings) as server:
        (response,) = server.ask(post(b"Content-Length: %d\r\n" % len(body), body))
        assert response.status == 200


# ---- number of connections


def until_answered(server: RawServer) -> None:
    """Wait until a connection is accepted again, since the server may notice later that others have ended."""
    end = time.monotonic() + PATIENCE_S
    while server.ask(PROBE)[0].status != 200:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("flag", ["max_connections", "max_connections_per_address"])
def test_connections_above_the_limit_are_503(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        raw_server(disable_uvicorn_access_log=True, **{"max_connections_per_address": 9, flag: 3}) as server,
    ):
        kept = [server.connect() for _ in range(3)]
        for client in kept:
            client.send(PROBE)
            assert (response := client.read()) is not None and response.status == 200
        for _ in range(5):
            with server.connect() as refused:
                (response,) = refused.read_all()
                error = json.loads(response.body)["error"]
                assert response.status == error["code"] == 503
                assert f"--{flag.replace('_', '-')}" in error["message"]
        if flag == "max_connections_per_address":
            with server.connect("127.0.0.2") as other:
                other.send(PROBE)
                assert (response := other.read()) is not None and response.status == 200
        lines = [record.message for record in caplog.records if record.name == LOGGER]
        assert len(lines) == 1 and "127.0.0.1" in lines[0], "one line for all of them"
        kept[0].close()
        until_answered(server)


def test_unix_socket_clients_have_no_address_limit(tmp_path: Path) -> None:
    with raw_server(uds=str(tmp_path / "s"), max_connections_per_address=1) as server:
        clients = [server.connect() for _ in range(4)]
        for client in clients:
            client.send(PROBE)
            assert (response := client.read()) is not None and response.status == 200


def test_connections_are_counted_by_address_and_network() -> None:
    assert network_of("10.1.2.3") == network_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2") != network_of("2001:db8:0:1::1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2") and network_of("") == ""
    counted = OpenConnections(max_total=3, max_per_address=2)
    for network in ("a", "a", "b"):
        assert not counted.problem(network)
        counted.add(network)
    assert "--max-connections;" in counted.problem("c")
    counted.remove("b")
    assert "--max-connections-per-address;" in counted.problem("a") and not counted.problem("b")


def test_default_limit_follows_the_open_file_limit() -> None:
    limits = {16: 1, 128: 64, 1024: 896, 4096: 3584, 1 << 20: 65_536, resource.RLIM_INFINITY: 65_536}
    assert {num_files: default_max_connections(num_files) for num_files in limits} == limits
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    counted = OpenConnections.limited_by(HttpSection())
    assert counted._max_total == default_max_connections(soft)
    assert counted._max_per_address == default_max_connections(soft) * 3 // 4


def test_refusals_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse() -> None:
        log = RefusalLog(interval_s=0.05)
        for _ in range(10):
            log.count("too large", "1.2.3.4")
        log.count("too slow", "1.2.3.4")
        await until(lambda: not log._counts)
        log.count("too large", "5.6.7.8")

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING, LOGGER):
        asyncio.run(refuse())
    assert [record.message for record in caplog.records] == [
        "Refused a client (1.2.3.4): too large",
        "Refused a client (1.2.3.4): too slow",
        "Refused 9 more connections within 0.05 s: too large",
        "Refused a client (5.6.7.8): too large",
    ]


def test_open_file_limit_is_raised() -> None:
    script = """
import resource
hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 512)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from quire.system.process import raise_file_limit
raise_file_limit()
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


def test_connections_passed_to_a_process_have_the_same_limits(tmp_path: Path) -> None:
    """Each of several API processes has these limits for connections that are passed to it, and reports when
    one is closed."""
    flags = {
        "host": "127.0.0.1",
        "port": 0,
        "max_connections": 2,
        "max_connections_per_address": 2,
        "request_header_timeout": LIMIT_S,
    }
    settings = make_settings(flags)

    async def talk(port: int, message: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(message)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(4096):
                answer += piece
        writer.close()
        return answer

    async def go() -> None:
        listener, stop, up = bind(settings.http), asyncio.Event(), asyncio.Event()
        port = listener.getsockname()[1]
        dealer = ConnectionDealer(listener, tmp_path / "closed", 1)
        handle = dealer.open(0)
        run = serve(
            settings,
            FakeEngine(),
            connections=ConnectionHandle(handle.channel.dup(), handle.closed_file, 0),
            stop=stop,
            announce=False,
            on_serving=lambda _: up.set(),
        )
        serving = asyncio.create_task(run)
        await up.wait()
        dealer.admit(0)
        asyncio.get_running_loop().add_reader(listener, dealer.deal)
        assert b" 431 " in await talk(port, get(b"X-A: b\r\n" * 129))
        assert b" 400 " in await talk(port, get(AUTH + b"Host: y\r\n"))
        halves = await asyncio.gather(*(talk(port, PROBE[:9]) for _ in range(3)))
        assert sorted(half.split()[1] for half in halves) == [b"408", b"408", b"503"]
        while dealer._closed.sum() < 5:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().remove_reader(listener)
        dealer.close()
        stop.set()
        await asyncio.wait_for(serving, PATIENCE_S)

    asyncio.run(asyncio.wait_for(go(), PATIENCE_S))
