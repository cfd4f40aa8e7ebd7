"""Tests of the HTTP client against servers that answer correctly, wrongly, late or not at all."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_openai import FakeServer

from quire.errors import ConfigError
from quire.remote.http import HttpClient, Response, ServerGone

BODY = b'{"prompt": "hi"}'


def raw_server(*answers: bytes) -> int:
    """Return a port that answers each connection with the next of `answers` after its request, and closes
    it."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def run_client(url: str, ask: Callable[[HttpClient], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def main() -> Any:
        client = HttpClient(url, **settings)
        try:
            return await ask(client)
        finally:
            client.close()

    return asyncio.run(main())


def get(port: int, **settings: Any) -> Response:
    result: Response = run_client(
        f"http://127.0.0.1:{port}", lambda client: client.request("GET", "/x"), **settings
    )
    return result


def test_connections_are_reused() -> None:
    """A connection per request would cost more than the request."""
    with FakeServer() as server:

        async def ask(client: HttpClient) -> list[int]:
            return [(await client.request("POST", "/v1/completions", BODY)).status for _ in range(5)]

        assert run_client(server.url, ask) == [200] * 5
        assert server.num_connections == 1


def test_idle_connection_closed_by_the_server_is_replaced() -> None:
    with FakeServer() as server:
        server.close_after = 1

        async def ask(client: HttpClient) -> list[int]:
            return [(await client.request("POST", "/v1/completions", BODY)).status for _ in range(4)]

        assert run_client(server.url, ask) == [200] * 4
        assert server.num_connections == 4 and len(server.requests) == 4


def test_body_is_streamed_and_an_error_is_not() -> None:
    """An error body that went to the stream reader would be lost."""
    with FakeServer() as server:
        pieces: list[bytes] = []

        async def ask(client: HttpClient, prompt: bytes) -> Response:
            body = b'{"stream": true, "prompt": "%s"}' % prompt
            return await client.request("POST", "/v1/completions", body, on_body=pieces.append)

        good = run_client(server.url, lambda client: ask(client, b"hi"))
        assert good.body == b"" and b"".join(pieces).endswith(b"data: [DONE]\n\n")
        pieces.clear()
        bad = run_client(server.url, lambda client: ask(client, b"refuse"))
        assert bad.status == 400 and b"asked to refuse" in bad.body and not pieces


def test_headers_reach_the_server() -> None:
    with FakeServer() as server:

        async def ask(client: HttpClient) -> None:
            await client.request("POST", "/v1/completions", BODY, headers={"X-Request-Id": "7"})

        run_client(server.url, ask, headers={"Authorization": "Bearer k"})
        headers = server.requests[0]["_headers"]
        assert headers["authorization"] == "Bearer k" and headers["x-request-id"] == "7"
        assert headers["host"] == server.url.removeprefix("http://")


def test_body_without_a_length_ends_with_the_connection() -> None:
    assert get(raw_server(b"HTTP/1.1 200 OK\r\n\r\nall of it")).body == b"all of it"


def test_interim_response_is_skipped() -> None:
    port = raw_server(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok")
    response = get(port)
    assert (response.status, response.body) == (201, b"ok")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
def test_truncated_response_is_an_error(answer: bytes) -> None:
    """A truncated response must not be taken for a complete one."""
    with pytest.raises(ServerGone, match="was lost"):
        get(raw_server(answer))


def test_missing_server_names_the_start_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ServerGone, match=r"Connection refused.*start one with `quire serve`"):
        get(port)


def test_unresponsive_server_times_out() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ServerGone, match=r"did not finish its answer in 0\.1 s"),
    ):
        get(server.getsockname()[1], timeout_s=0.1)


def test_cancelled_request_disconnects() -> None:
    """The server notices the disconnect, and the connection is not reused."""
    with FakeServer() as server:

        async def ask(client: HttpClient) -> None:
            arrived = asyncio.Event()
            body = b'{"stream": true, "prompt": "slow", "max_tokens": 10000}'
            request = client.request("POST", "/v1/completions", body, on_body=lambda _: arrived.set())
            task = asyncio.create_task(request)
            await asyncio.wait_for(arrived.wait(), 60)
            task.cancel()
            await asyncio.wait([task])
            deadline = time.monotonic() + 60  # the answer itself would take 500 s
            while server.busy and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert not server.busy
            assert (await client.request("POST", "/v1/completions", BODY)).status == 200

        run_client(server.url, ask)
        assert server.num_connections == 2


def test_failing_reader_fails_only_its_request() -> None:
    def broken(_: bytes) -> None:
        raise KeyError("reader")

    with FakeServer() as server:

        async def ask(client: HttpClient) -> int:
            with pytest.raises(KeyError):
                body = b'{"stream": true, "prompt": "hi"}'
                await client.request("POST", "/v1/completions", body, on_body=broken)
            return (await client.request("POST", "/v1/completions", BODY)).status

        assert run_client(server.url, ask) == 200


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:notaport", ""])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:8000"):
        HttpClient(url)


def test_header_injection_is_refused() -> None:
    with pytest.raises(ConfigError, match="Authorization"):
        HttpClient("http://x", headers={"Authorization": "Bearer a\r\nEvil: yes"})
