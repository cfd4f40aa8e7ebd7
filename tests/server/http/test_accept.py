"""Tests of the distribution of connections to API processes: even, only to live processes, none lost."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvloop
from fake_engine import FakeEngine

from quire.server.http.accept import (
    ConnectionAcceptor,
    ConnectionDealer,
    ConnectionHandle,
    ConnectionReceiver,
)
from quire.server.http.protocol import HttpProtocol
from quire.server.http.sockets import bind
from quire.server.main import serve
from quire.server.settings import make_settings

NUM_PROCESSES = 4


class FakeProcess:
    """API process that accepts the connections it receives and does nothing with them."""

    def __init__(self, handle: ConnectionHandle) -> None:
        self.handle = ConnectionHandle(handle.channel.dup(), handle.closed_file, handle.index)
        self.handle.channel.setblocking(False)
        self.receiver = ConnectionReceiver(self.handle)
        self.open: list[socket.socket] = []
        self.num_received = 0

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while received := socket.recv_fds(self.handle.channel, 1, 1)[1]:
                self.open += [socket.socket(fileno=fd) for fd in received]
                self.num_received += len(received)

    def close_one(self) -> None:
        self.open.pop().close()
        self.receiver.count_closed()


class Cluster:
    """Dealer with its processes and their clients."""

    def __init__(self, folder: Path) -> None:
        self.listener = bind(make_settings({"host": "127.0.0.1", "port": 0}).http)
        self.address = self.listener.getsockname()
        self.dealer = ConnectionDealer(self.listener, folder / "closed", NUM_PROCESSES)
        self.processes = [FakeProcess(self.dealer.open(index)) for index in range(NUM_PROCESSES)]
        self.clients: list[socket.socket] = []

    def connect(self, count: int = 1) -> None:
        for _ in range(count):
            self.clients.append(socket.create_connection(self.address))

    def deal(self) -> list[int]:
        """Distribute all waiting connections and return how many each process has."""
        for _ in range(10):
            self.dealer.deal()
            for process in self.processes:
                process.receive()
        return [len(process.open) for process in self.processes]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    for index in range(NUM_PROCESSES):
        cluster.dealer.admit(index)
    yield cluster
    cluster.dealer.close()
    for client in [
        *cluster.clients,
        *(connection for process in cluster.processes for connection in process.open),
    ]:
        client.close()


@pytest.mark.parametrize("count", [8, 64, 256, 1024])
def test_simultaneous_connections_are_spread_evenly(cluster: Cluster, count: int) -> None:
    cluster.connect(count)
    assert cluster.deal() == [count // NUM_PROCESSES] * NUM_PROCESSES


def test_sequential_connections_rotate(cluster: Cluster) -> None:
    """Catches a dealer that always picks the first of several idle processes."""
    for _ in range(40):
        cluster.connect()
        cluster.deal()
        next(process for process in cluster.processes if process.open).close_one()
    assert [process.num_received for process in cluster.processes] == [10] * NUM_PROCESSES


def test_process_with_most_closed_connections_gets_the_next(cluster: Cluster) -> None:
    cluster.connect(40)
    cluster.deal()
    for _ in range(6):
        cluster.processes[2].close_one()
    cluster.connect(6)
    assert cluster.deal() == [10] * NUM_PROCESSES


def test_dead_process_gets_none_and_its_successor_starts_at_zero(cluster: Cluster) -> None:
    cluster.connect(16)
    cluster.deal()
    for connection in cluster.processes[1].open:
        connection.close()
    cluster.processes[1].handle.channel.close()
    cluster.connect(12)
    cluster.processes[1].open = []
    cluster.processes[1].receive = lambda: None  # type: ignore[method-assign]
    assert cluster.deal() == [8, 0, 8, 8]
    cluster.processes[1] = FakeProcess(cluster.dealer.open(1))
    cluster.connect(4)
    assert sorted(cluster.deal()) == [0, 9, 9, 10], "the process does not serve yet"
    cluster.dealer.admit(1)
    cluster.connect(8)
    assert cluster.deal()[1] == 8


def test_full_process_is_skipped(cluster: Cluster) -> None:
    """Catches a stopped process that keeps all new connections."""
    stopped = cluster.processes[0]
    stopped.receive = lambda: None  # type: ignore[method-assign]
    for _ in range(80):
        cluster.connect(NUM_PROCESSES)
        cluster.deal()
        for process in cluster.processes[1:]:
            while process.open:
                process.close_one()
    taken = [process.num_received for process in cluster.processes[1:]]
    assert min(taken) > 90 and sum(taken) > 300


def test_connections_wait_until_a_process_serves(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.connect(5)
    assert cluster.deal() == [0] * NUM_PROCESSES and not cluster.dealer.readable_sockets
    cluster.dealer.admit(3)
    assert cluster.dealer.readable_sockets and cluster.deal() == [0, 0, 0, 5]
    cluster.dealer.close()
    with pytest.raises(ConnectionRefusedError):
        cluster.connect()
    for client in [*cluster.clients, *cluster.processes[3].open]:
        client.close()


async def test_connection_without_a_descriptor_counts_as_closed(cluster: Cluster) -> None:
    """Catches a process without free descriptors that looks busier with each connection it loses."""
    sender, receiver = socket.socketpair()
    receiver = ConnectionReceiver(replace(cluster.processes[2].handle, channel=receiver))
    receiver.start(asyncio.Protocol, None)
    sender.send(b"c")  # the kernel drops a descriptor that does not fit
    async with asyncio.timeout(60):
        while not cluster.dealer._closed[2]:
            await asyncio.sleep(0.01)
    receiver.stop()
    sender.close()
    assert cluster.dealer._closed.tolist() == [0, 0, 1, 0]


def test_servers_answer_the_connections_they_receive(tmp_path: Path) -> None:
    """Two servers on one port and one event loop: both answer and report closed connections."""
    settings = make_settings({"host": "127.0.0.1", "port": 0})

    async def go() -> None:
        listener, stop = bind(settings.http), asyncio.Event()
        port = listener.getsockname()[1]
        dealer = ConnectionDealer(listener, tmp_path / "closed", 2)
        up: list[int] = []
        servers = []
        for index in range(2):
            handle = dealer.open(index)
            server_handle = ConnectionHandle(handle.channel.dup(), handle.closed_file, index)
            engine = FakeEngine("abc")
            engine.facts = replace(engine.facts, model_names=(f"m{index}",))
            run = serve(
                settings,
                engine,
                connections=server_handle,
                stop=stop,
                announce=False,
                on_serving=lambda _, i=index: up.append(i),
            )
            servers.append(asyncio.create_task(run))
        while len(up) < 2:
            await asyncio.sleep(0.01)
        for index in up:
            dealer.admit(index)
        asyncio.get_running_loop().add_reader(listener, dealer.deal)
        names: Counter[str] = Counter()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(6):
                client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
                await stack.enter_async_context(client)
                names[(await client.get("/v1/models")).json()["data"][0]["id"]] += 1
        assert names == {"m0": 3, "m1": 3}
        while dealer._closed.sum() < 6:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().remove_reader(listener)
        dealer.close()
        stop.set()
        await asyncio.wait_for(asyncio.gather(*servers), 60)

    asyncio.run(asyncio.wait_for(go(), 120))


def test_queued_connections_are_accepted_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that accepts one connection per turn of the event loop, as uvloop does: in a flood of
    connections, /health waited for as many turns as connections were queued before it."""
    settings = make_settings({"host": "127.0.0.1", "port": 0})
    made, turn, count = list[int](), [0], 50
    make = HttpProtocol.connection_made

    def connection_made(self: HttpProtocol, transport: asyncio.Transport) -> None:
        made.append(turn[0])
        make(self, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)

    async def go() -> None:
        listener, stop = bind(settings.http), asyncio.Event()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
        server = asyncio.create_task(serve(settings, FakeEngine("a"), [listener], stop=stop, announce=False))
        while len(made) < count:
            turn[0] += 1
            await asyncio.sleep(0)
        for client in clients:
            client.close()
        stop.set()
        await server

    uvloop.run(asyncio.wait_for(go(), 120))
    assert max(made) - min(made) < 5


class FullListener(socket.socket):
    """Listening socket of a process that has no free descriptor three times."""

    num_failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_connection_is_accepted_when_descriptors_are_free_again(caplog: pytest.LogCaptureFixture) -> None:
    made = list[asyncio.BaseTransport]()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def go() -> None:
        with FullListener() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            acceptor = ConnectionAcceptor([listener])
            acceptor.start(Protocol, None)
            with socket.create_connection(listener.getsockname()):
                while not made:
                    await asyncio.sleep(0.01)
            acceptor.stop()
            made[0].close()

    with caplog.at_level(logging.WARNING, "quire.server.http.accept"):
        asyncio.run(asyncio.wait_for(go(), 120))
    assert [record.getMessage() for record in caplog.records] == [
        "A connection could not be accepted: [Errno 24] Too many open files"
    ]
