"""The client against servers that answer well, badly, late and not at all."""

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
    """A port that gives each connection the next of `answers` after its request, and closes it."""
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


def asked(url: str, ask: Callable[[HttpClient], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def main() -> Any:
        client = HttpClient(url, **settings)
        try:
            return await ask(client)
        finally:
            client.close()

    return asyncio.run(main())


def get(port: int, **settings: Any) -> Response:
    found: Response = asked(
        f"http://127.0.0.1:{port}", lambda client: client.request("GET", "/x"), **settings
    )
    return found


def test_connections_are_kept() -> None:
    """A connection per request would cost more than the request."""
    with FakeServer() as server:

        async def ask(client: HttpClient) -> list[int]:
            return [(await client.request("POST", "/v1/completions", BODY)).status for _ in range(5)]

        assert asked(server.url, ask) == [200] * 5
        assert server.num_connections == 1


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    with FakeServer() as server:
        server.close_after = 1

        async def ask(client: HttpClient) -> list[int]:
            return [(await client.request("POST", "/v1/completions", BODY)).status for _ in range(4)]

        assert asked(server.url, ask) == [200] * 4
        assert server.num_connections == 4 and len(server.requests) == 4


def test_a_body_goes_on_in_pieces_and_an_error_does_not() -> None:
    """An error body that went to the stream reader would be lost."""
    with FakeServer() as server:
        pieces: list[bytes] = []

        async def ask(client: HttpClient, prompt: bytes) -> Response:
            body = b'{"stream": true, "prompt": "%s"}' % prompt
            return await client.request("POST", "/v1/completions", body, on_body=pieces.append)

        good = asked(server.url, lambda client: ask(client, b"hi"))
        assert good.body == b"" and b"".join(pieces).endswith(b"data: [DONE]\n\n")
        pieces.clear()
        bad = asked(server.url, lambda client: ask(client, b"refuse"))
        assert bad.status == 400 and b"asked to refuse" in bad.body and not pieces


def test_headers_reach_the_server() -> None:
    with FakeServer() as server:

        async def ask(client: HttpClient) -> None:
            await client.request("POST", "/v1/completions", BODY, headers={"X-Request-Id": "7"})

        asked(server.url, ask, headers={"Authorization": "Bearer k"})
        headers = server.requests[0]["_headers"]
        assert headers["authorization"] == "Bearer k" and headers["x-request-id"] == "7"
        assert headers["host"] == server.url.removeprefix("http://")


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert get(raw_server(b"HTTP/1.1 200 OK\r\n\r\nall of it")).body == b"all of it"


def test_an_interim_answer_is_not_the_answer() -> None:
    port = raw_server(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok")
    found = get(port)
    assert (found.status, found.body) == (201, b"ok")


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
def test_an_answer_that_breaks_off_is_an_error(answer: bytes) -> None:
    """A cut answer must not pass for a whole one."""
    with pytest.raises(ServerGone, match="was lost"):
        get(raw_server(answer))


def test_nobody_there_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ServerGone, match=r"Connection refused.*start one with `quire serve`"):
        get(port)


def test_a_server_that_never_answers_runs_into_the_limit() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ServerGone, match=r"did not finish its answer in 0\.1 s"),
    ):
        get(server.getsockname()[1], timeout_s=0.1)


def test_a_cancelled_request_hangs_up() -> None:
    """The server learns that nobody listens any more, and the connection is not used again."""
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

        asked(server.url, ask)
        assert server.num_connections == 2


def test_a_reader_that_fails_fails_only_its_request() -> None:
    def broken(_: bytes) -> None:
        raise KeyError("reader")

    with FakeServer() as server:

        async def ask(client: HttpClient) -> int:
            with pytest.raises(KeyError):
                body = b'{"stream": true, "prompt": "hi"}'
                await client.request("POST", "/v1/completions", body, on_body=broken)
            return (await client.request("POST", "/v1/completions", BODY)).status

        assert asked(server.url, ask) == 200


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:notaport", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:8000"):
        HttpClient(url)


def test_a_header_cannot_smuggle_another() -> None:
    with pytest.raises(ConfigError, match="Authorization"):
        HttpClient("http://x", headers={"Authorization": "Bearer a\r\nEvil: yes"})
