"""Messages that two parsers could read as different requests: each is refused, or answered as it is written,
and the connection stays in sync. This is the class of request smuggling, for which vLLM has no advisory:
Content-Length against Transfer-Encoding, chunks, line ends, repeated headers, trailers, Upgrade."""

import json
import time

import pytest
from http_corpus import AUTH, BODY, CASES, CHUNKED, CHUNKS, LENGTH, Case, get, post
from raw_http import KEY, PROBE, RawServer

PAUSE_S = 0.02
"""Seconds between pieces, so that they arrive one by one."""
FEW = 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ambiguous_messages_are_refused_or_answered_as_written(http_server: RawServer, case: Case) -> None:
    with http_server.connect() as client:
        for piece in case.pieces:
            client.send(piece)
            time.sleep(PAUSE_S if 1 < len(case.pieces) <= FEW else 0)
        if case.is_closed:
            assert tuple(response.status for response in client.read_all()) == case.statuses
            return
        for status in case.statuses:
            response = client.read()
            assert response is not None and response.status == status
        client.send(PROBE)
        response = client.read()
        assert response is not None and response.status == 200 and b"also-fake" in response.body


def test_refusal_is_json_with_the_remedy(http_server: RawServer) -> None:
    (response,) = http_server.ask(get(AUTH + b"Host: y\r\n"))
    assert response.headers["content-type"] == "application/json"
    assert response.headers["connection"] == "close"
    error = json.loads(response.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == 400
    assert error["message"] == "the request has more than one host header; send one"


def test_refusal_is_not_sent_as_the_answer_of_an_earlier_request(http_server: RawServer) -> None:
    """Catches an error response that is written while an earlier request runs: the client would take it for
    that request's answer."""
    slow = json.dumps({"prompt": "ab", "max_tokens": 3}).encode()
    with http_server.connect() as client:
        client.send(post(b"Content-Length: %d\r\n" % len(slow), slow) + b"nonsense\r\n\r\n")
        (response,) = client.read_all()
    assert response.status == 200 and json.loads(response.body)["object"] == "text_completion"


def test_trailers_change_no_header(http_server: RawServer) -> None:
    """Catches trailers that replace headers that a proxy has checked."""
    trailers = b"X-Request-Id: trailer\r\nContent-Type: text/plain\r\nAuthorization: Bearer x\r\n\r\n"
    engine = http_server.engine
    (response,) = http_server.ask(post(CHUNKED + b"X-Request-Id: head\r\n", CHUNKS[:-2] + trailers))
    assert response.status == 200 and json.loads(response.body)["id"].endswith("head")
    assert "head" in engine.seen[-1][0] and "trailer" not in engine.seen[-1][0]


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_head_has_no_body(http_server: RawServer, path: str) -> None:
    """Load balancers probe with HEAD; a body would be read as the next response."""
    key = f"Authorization: Bearer {KEY}\r\n".encode()
    with http_server.connect() as client:
        client.send(b"HEAD %b HTTP/1.1\r\n%b\r\n" % (path.encode(), key))
        response = client.read(has_body=False)
        assert response is not None and response.status == 200
        client.send(PROBE)
        response = client.read()
        assert response is not None and response.status == 200


def test_large_body_arrives_complete_in_pieces_of_any_size(http_server: RawServer) -> None:
    """Catches bytes that are lost where one read is larger than the header limit."""
    body = json.dumps({"prompt": "ab", "max_tokens": 2, "user": "x" * 1_000_000}).encode()
    for headers, content in (
        (b"Content-Length: %d\r\n" % len(body), body),
        (CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        (CHUNKED, b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in _split(body, 70_001)) + b"0\r\n\r\n"),
    ):
        responses = http_server.ask(post(headers, content) + post(LENGTH, BODY), num=2)
        assert [response.status for response in responses] == [200, 200]


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
