"""The port at which other machines join an engine: unknown peers cost little and end nothing.

Guards against the classes of CVE-2025-30202 (sockets that any peer can reach) and CVE-2025-30165 (services
between nodes that trust any connection)."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from quire.executor import tcp
from quire.executor.tcp import (
    MAX_JOIN_BYTES,
    MAX_UNADMITTED,
    HeadEnd,
    Join,
    RemoteRanks,
    configure_socket,
    decode_from_head,
    encode,
)

PATIENCE_S = 60.0
TOKEN = "the secret of the deployment"


class Listener:
    """A listening socket with an `accept` that can be made to fail."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.failures: list[OSError] = []

    def accept(self) -> Any:
        accepted = self.socket.accept()
        if self.failures:
            accepted[0].close()
            raise self.failures.pop()
        return accepted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


class Port:
    """The port of a head node that waits for two machines, and connections to it."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.worker_group = RemoteRanks(self.listener, range(1, 3), 1, token=TOKEN)  # type: ignore[arg-type]
        self.sockets: list[socket.socket] = []
        self.pipes: list[Connection] = []

    def connect(self) -> socket.socket:
        self.sockets.append(socket.create_connection(self.listener.getsockname(), timeout=PATIENCE_S))
        return self.sockets[-1]

    def send_join(self, rank: int, token: str) -> Connection:
        self.pipes.append(configure_socket(self.connect()))
        self.pipes[-1].send_bytes(encode(Join(rank, {}, token)))
        return self.pipes[-1]

    def join(self, rank: int) -> None:
        self.send_join(rank, TOKEN)
        until(lambda: rank in self.worker_group.nodes)

    def refusal(self, rank: int, token: str = TOKEN) -> HeadEnd:
        """Return the message that a refused machine gets."""
        pipe = self.send_join(rank, token)
        assert pipe.poll(PATIENCE_S)
        end = decode_from_head(pipe.recv_bytes())
        assert isinstance(end, HeadEnd)
        return end

    def close(self) -> None:
        self.worker_group.end()
        for connection in (*self.sockets, *self.pipes):
            connection.close()


def until(is_done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(PATIENCE_S)
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS])
def test_failed_accept_does_not_stop_the_listener(port: Port, number: int) -> None:
    port.listener.failures += [OSError(number, "none left")] * 2
    for _ in range(2):
        assert is_closed(port.connect())
    port.join(1)
    port.join(2)
    assert port.worker_group.await_all(time.monotonic() + PATIENCE_S)


def test_machine_without_the_token_is_refused(port: Port) -> None:
    for token in ("", "guess", "é"):
        refusal = port.refusal(1, token)
        assert refusal.is_final
        assert "QUIRE_CLUSTER_TOKEN must be the same on every machine" in refusal.problem
    port.join(1)
    assert port.refusal(1).problem.startswith("two machines have --node-rank 1")
    assert "node 9 (127.0.0.1) is not one of the expected nodes" in port.refusal(9).problem
    port.join(2)
    assert port.worker_group.await_all(time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize("size", [MAX_JOIN_BYTES + 1, 1 << 30, 0x7FFFFFFF, 0xFFFFFFFF])
def test_oversized_first_message_is_not_read(port: Port, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 10 * PATIENCE_S)
    sock = port.connect()
    sock.sendall(size.to_bytes(4, "big"))
    assert is_closed(sock)
    port.join(1)


def test_first_message_has_a_timeout(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout also applies to a message that arrives byte by byte."""
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.2)
    silent, slow = port.connect(), port.connect()
    closed = threading.Event()

    def drip() -> None:
        try:
            slow.sendall((100).to_bytes(4, "big"))
            while not closed.wait(0.02):
                slow.sendall(b"x")
        except OSError:
            closed.set()

    threading.Thread(target=drip, daemon=True).start()
    assert is_closed(silent) and closed.wait(PATIENCE_S)


def test_silent_connections_are_limited(port: Port) -> None:
    before = {*threading.enumerate()}  # Threads of other tests may end meanwhile.

    def num_threads() -> int:
        return len({*threading.enumerate()} - before)

    waiting = [port.connect() for _ in range(MAX_UNADMITTED)]
    until(lambda: num_threads() >= MAX_UNADMITTED)
    for _ in range(20):
        assert is_closed(port.connect())
    assert num_threads() <= MAX_UNADMITTED
    waiting.pop().close()
    until(lambda: num_threads() < MAX_UNADMITTED)
    port.join(1)  # there is a free slot again
