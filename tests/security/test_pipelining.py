"""Pipelined requests: a disconnect aborts all of them, and the number of waiting bytes is bounded. If a
request ran on after its client has gone, it would hold a row, KV cache blocks and the slot of its key. This
is the class of CVE-2024-8939: work that costs the client nothing."""

import json
import time
from collections.abc import Callable, Iterator

import pytest
from fake_engine import FakeEngine
from http_corpus import BODY, LENGTH, get, post
from raw_http import PATIENCE_S, PROBE, RawServer, raw_server

from quire.server.http.protocol import MAX_PIPELINED_BYTES

ENDLESS = json.dumps({"prompt": "ab", "max_tokens": 90_000, "ignore_eos": True}).encode()
STREAM = json.dumps({"prompt": "ab", "max_tokens": 90_000, "ignore_eos": True, "stream": True}).encode()


@pytest.fixture(scope="module")
def endless_server() -> Iterator[RawServer]:
    engine = FakeEngine("x" * 500, step_s=0.01, max_model_len=100_000)
    with raw_server(engine, disable_uvicorn_access_log=True) as server:
        yield server


def running(body: bytes) -> bytes:
    return post(b"Content-Length: %d\r\n" % len(body), body)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("body", [ENDLESS, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "behind",
    [
        (get(),),
        (get() * 3, get()),
        (get()[:20],),
        (running(ENDLESS),),
        (post(b"Content-Length: 1000000\r\n", b"x" * 100_000),),
        (b"x" * (2 * MAX_PIPELINED_BYTES),),
        (get() * 40,),
        (get() + b"nonsense\r\n\r\n",),
    ],
    ids=["get", "several", "half", "post", "half of a large post", "too much", "too many", "invalid"],
)
@pytest.mark.parametrize("is_together", [True, False], ids=["at once", "later"])
def test_disconnect_aborts_every_pipelined_request(
    endless_server: RawServer, body: bytes, behind: tuple[bytes, ...], is_together: bool
) -> None:
    """Catches a server that stops reading at the second request, so that it does not notice the
    disconnect."""
    engine, client = endless_server.engine, endless_server.connect()
    num_seen, num_aborted = len(engine.seen), len(engine.aborted)
    if is_together:
        client.send(running(body) + b"".join(behind))
    else:
        client.send(running(body))
        until(lambda: engine.num_in_flight == 1)
        for piece in behind:
            client.send(piece)
    until(lambda: engine.num_in_flight == 1)
    client.close()
    until(lambda: engine.num_in_flight == 0)
    assert len(engine.aborted) == num_aborted + 1
    assert len(engine.seen) == num_seen + 1, "the requests after it never started"


def test_pipelined_responses_come_in_order() -> None:
    with raw_server(FakeEngine("ab", step_s=0.01), disable_uvicorn_access_log=True) as server:
        names = [f"r{number}" for number in range(10)]
        messages = [post(LENGTH + f"X-Request-Id: {name}\r\n".encode(), BODY) for name in names]
        with server.connect() as client:
            client.send(b"".join(messages[:4]) + messages[4][:50])
            time.sleep(0.02)
            client.send(messages[4][50:] + messages[5][:-3])
            time.sleep(0.02)
            for piece in (messages[5][-3:], *messages[6:]):
                client.send(piece)
            responses = [client.read() for _ in names]
        ids = [json.loads(response.body)["id"] for response in responses if response is not None]
        assert [id.removeprefix("cmpl-") for id in ids] == names


def test_waiting_bytes_are_bounded_and_the_running_request_completes() -> None:
    """Catches memory that a client fills while its first request runs."""
    with raw_server(FakeEngine("abc", step_s=0.1), disable_uvicorn_access_log=True) as server:
        with server.connect() as client:
            client.send(running(BODY))
            until(lambda: server.engine.num_in_flight == 1)
            client.send(get(b"X-A: " + b"b" * (4 * MAX_PIPELINED_BYTES) + b"\r\n"))
            assert [response.status for response in client.read_all()] == [200]
        assert server.ask(PROBE)[0].status == 200


def test_rest_of_a_refused_body_is_discarded(endless_server: RawServer) -> None:
    """Catches bytes of an early refused body that stay in memory, or are parsed as a request."""
    with endless_server.connect() as client:
        client.send(post(b"Content-Length: 1000000\r\n", b"").replace(b"Bearer ", b"Bearer x"))
        response = client.read()
        assert response is not None and response.status == 401
        client.send(b"x" * 1_000_000 + PROBE)
        response = client.read()
        assert response is not None and response.status == 200
