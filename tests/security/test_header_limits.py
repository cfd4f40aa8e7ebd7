"""Endless headers, before any key is checked (CVE-2025-48956): their bytes and their number are bounded,
wherever they are in a message."""

import argparse
import json

import pytest
from http_corpus import AUTH, BODY, CHUNKED, LENGTH, get, post
from raw_http import PROBE, RawServer, Response, raw_server

from quire.server.settings import add_server_flags, server_settings

MAX_BYTES, MAX_HEADERS = 64 << 10, 128
MANY = 4 << 20


def refusal(server: RawServer, *pieces: bytes) -> Response:
    """Return the only response to `pieces`; the server must close the connection after it."""
    with server.connect() as client:
        for piece in pieces:
            client.send(piece)
        (response,) = client.read_all()
    error = json.loads(response.body)["error"]
    assert error["code"] == response.status and "--h11-max-" in error["message"]
    return response


@pytest.mark.parametrize(
    "message",
    [
        get(b"X-A: " + b"b" * MANY + b"\r\n"),
        get(b"X-" + b"a" * MANY + b": b\r\n"),
        get(b"X-A: b\r\n" * (MANY // 8)),
        get(path=b"/" + b"a" * MANY),
        b"\r\n" * MANY,
        get(b"X-A: " + b"b" * MAX_BYTES + b"\r\n"),
    ],
    ids=["a value", "a name", "many headers", "a path", "empty lines", "a little too much"],
)
def test_oversized_headers_are_431(http_server: RawServer, message: bytes) -> None:
    assert refusal(http_server, message).status == 431


@pytest.mark.parametrize(
    "behind",
    [b"5;" + b"a" * MANY, b"0\r\nX-A: " + b"b" * MANY, b"0\r\n" + b"X-A: b\r\n" * (MANY // 8)],
    ids=["chunk extension", "trailer", "many trailers"],
)
def test_chunk_extensions_and_trailers_are_bounded(http_server: RawServer, behind: bytes) -> None:
    """Catches a limit that applies to the headers only: the parser collects trailers in the same way."""
    assert refusal(http_server, post(CHUNKED, b"1\r\n{\r\n" + behind)).status == 431


def test_tls_on_the_http_port_is_named(http_server: RawServer) -> None:
    (response,) = http_server.ask(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert response.status == 400 and b"the client speaks TLS; this server speaks http://" in response.body


def test_header_count_is_bounded(http_server: RawServer) -> None:
    fitting = b"".join(b"X-%d: b\r\n" % number for number in range(MAX_HEADERS - 2))
    assert http_server.ask(get(AUTH + fitting))[0].status == 200
    assert refusal(http_server, get(AUTH + fitting + b"X-Last: b\r\n")).status == 431
    assert refusal(http_server, get(AUTH + b"X-A: b\r\n" * (MAX_HEADERS - 1))).status == 431


def test_largest_allowed_headers_are_accepted(http_server: RawServer) -> None:
    """The body follows in the same piece or in another. Its bytes are not counted."""
    head = post(LENGTH, b"")
    padded = post(LENGTH + b"X-A: " + b"b" * (MAX_BYTES - len(head) - 7) + b"\r\n", b"")
    assert len(padded) == MAX_BYTES
    for pieces in ((padded, BODY), (padded + BODY,), (padded[:100], padded[100:] + BODY)):
        with http_server.connect() as client:
            for piece in pieces:
                client.send(piece)
            client.send(PROBE)
            responses = [client.read(), client.read()]
            assert [response and response.status for response in responses] == [200, 200]


def test_headers_in_many_pieces_are_counted_together(http_server: RawServer) -> None:
    """Catches a limit on a single read."""
    pieces = [b"X-%d: " % number + b"b" * 1000 + b"\r\n" for number in range(100)]
    assert refusal(http_server, b"GET / HTTP/1.1\r\n", *pieces).status == 431


def test_oversized_pipelined_headers_are_not_answered(http_server: RawServer) -> None:
    with http_server.connect() as client:
        client.send(get() + b"GET / HTTP/1.1\r\nX-A: ")
        for _ in range(64):
            client.send(b"b" * (MAX_BYTES // 8))
        statuses = [response.status for response in client.read_all()]
    assert statuses in ([200], [200, 431])


def test_refused_connection_does_not_affect_others(http_server: RawServer) -> None:
    with http_server.connect() as other:
        other.send(PROBE[:20])
        assert refusal(http_server, get(b"X-A: " + b"b" * MANY + b"\r\n")).status == 431
        other.send(PROBE[20:])
        response = other.read()
        assert response is not None and response.status == 200


def test_vllm_header_limit_flags_are_honoured() -> None:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    flags = ["--h11-max-incomplete-event-size", "1024", "--h11-max-header-count", "4"]
    http = server_settings(parser.parse_args(flags)).http
    assert (http.h11_max_incomplete_event_size, http.h11_max_header_count) == (1024, 4)
    with raw_server(h11_max_incomplete_event_size=1024, h11_max_header_count=4) as server:
        assert server.ask(get(AUTH + b"X-A: b\r\nX-B: c\r\n"))[0].status == 200
        assert refusal(server, get(AUTH + b"X-A: b\r\nX-B: c\r\nX-C: d\r\n")).status == 431
        assert refusal(server, get(AUTH + b"X-A: " + b"b" * 1024 + b"\r\n")).status == 431
        large = json.dumps({"prompt": "a" * 400, "max_tokens": 2, "user": "x" * 100_000}).encode()
        assert server.ask(post(b"Content-Length: %d\r\n" % len(large), large))[0].status == 200
    with raw_server(h11_max_incomplete_event_size=4 << 20, h11_max_header_count=4) as server:
        assert server.ask(get(AUTH + b"X-A: " + b"b" * (1 << 20) + b"\r\n"))[0].status == 200
