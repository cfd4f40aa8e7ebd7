"""Connections dealt to processes: evenly, to the living, and none lost."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine

from quire.server.http.accept import ConnectionDealer, ConnectionHandle, ConnectionReceiver
from quire.server.http.sockets import bind
from quire.server.main import serve
from quire.server.settings import make_settings

NUM_HANDS = 4


class Player:
    """A process that takes what it is dealt and does nothing with it."""

    def __init__(self, hand: ConnectionHandle) -> None:
        self.hand = ConnectionHandle(hand.channel.dup(), hand.closed_file, hand.index)
        self.hand.channel.setblocking(False)
        self.taker = ConnectionReceiver(self.hand)
        self.open: list[socket.socket] = []
        self.num_taken = 0

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while received := socket.recv_fds(self.hand.channel, 1, 1)[1]:
                self.open += [socket.socket(fileno=each) for each in received]
                self.num_taken += len(received)

    def close_one(self) -> None:
        self.open.pop().close()
        self.taker.count_closed()


class Table:
    """A dealer, its players and their clients."""

    def __init__(self, folder: Path) -> None:
        self.listener = bind(make_settings({"host": "127.0.0.1", "port": 0}).http)
        self.address = self.listener.getsockname()
        self.dealer = ConnectionDealer(self.listener, folder / "closed", NUM_HANDS)
        self.players = [Player(self.dealer.open(index)) for index in range(NUM_HANDS)]
        self.clients: list[socket.socket] = []

    def connect(self, count: int = 1) -> None:
        for _ in range(count):
            self.clients.append(socket.create_connection(self.address))

    def deal(self) -> list[int]:
        """What each player holds after everything that waits is dealt."""
        for _ in range(10):
            self.dealer.deal()
            for player in self.players:
                player.take()
        return [len(player.open) for player in self.players]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    for index in range(NUM_HANDS):
        made.dealer.admit(index)
    yield made
    made.dealer.close()
    for client in [*made.clients, *(each for player in made.players for each in player.open)]:
        client.close()


@pytest.mark.parametrize("count", [8, 64, 256, 1024])
def test_many_at_once_are_dealt_evenly(table: Table, count: int) -> None:
    table.connect(count)
    assert table.deal() == [count // NUM_HANDS] * NUM_HANDS


def test_one_after_the_other_goes_round(table: Table) -> None:
    """Catches a dealer for whom an idle process is as good as any other idle process, and takes the first."""
    for _ in range(40):
        table.connect()
        table.deal()
        next(player for player in table.players if player.open).close_one()
    assert [player.num_taken for player in table.players] == [10] * NUM_HANDS


def test_who_has_closed_most_gets_the_next(table: Table) -> None:
    table.connect(40)
    table.deal()
    for _ in range(6):
        table.players[2].close_one()
    table.connect(6)
    assert table.deal() == [10] * NUM_HANDS


def test_the_dead_get_nothing_and_their_successor_starts_at_none(table: Table) -> None:
    table.connect(16)
    table.deal()
    for each in table.players[1].open:
        each.close()
    table.players[1].hand.channel.close()
    table.connect(12)
    table.players[1].open = []
    table.players[1].take = lambda: None  # type: ignore[method-assign]
    assert table.deal() == [8, 0, 8, 8]
    table.players[1] = Player(table.dealer.open(1))
    table.connect(4)
    assert sorted(table.deal()) == [0, 9, 9, 10], "it does not serve yet"
    table.dealer.admit(1)
    table.connect(8)
    assert table.deal()[1] == 8


def test_a_hand_that_is_full_is_passed_over(table: Table) -> None:
    """Catches a stopped process in whose hand all others' connections end."""
    stopped = table.players[0]
    stopped.take = lambda: None  # type: ignore[method-assign]
    for _ in range(80):
        table.connect(NUM_HANDS)
        table.deal()
        for player in table.players[1:]:
            while player.open:
                player.close_one()
    taken = [player.num_taken for player in table.players[1:]]
    assert min(taken) > 90 and sum(taken) > 300


def test_nobody_is_refused_while_nobody_serves(tmp_path: Path) -> None:
    made = Table(tmp_path)
    made.connect(5)
    assert made.deal() == [0] * NUM_HANDS and not made.dealer.awaited
    made.dealer.admit(3)
    assert made.dealer.awaited and made.deal() == [0, 0, 0, 5]
    made.dealer.close()
    with pytest.raises(ConnectionRefusedError):
        made.connect()
    for client in [*made.clients, *made.players[3].open]:
        client.close()


def test_a_connection_without_a_descriptor_counts_as_closed(table: Table) -> None:
    """Catches a process that has no descriptor left and looks busier with each connection that it loses."""

    async def go() -> None:
        ours, theirs = socket.socketpair()
        taker = ConnectionReceiver(replace(table.players[2].hand, channel=theirs))
        taker.start(asyncio.Protocol, None)
        ours.send(b"c")  # the kernel leaves a descriptor out where there is no room for it
        async with asyncio.timeout(60):
            while not table.dealer._closed[2]:
                await asyncio.sleep(0.01)
        taker.stop()
        ours.close()

    asyncio.run(go())
    assert table.dealer._closed.tolist() == [0, 0, 1, 0]


def test_a_server_answers_what_it_is_dealt(tmp_path: Path) -> None:
    """Two servers over one port, in one loop: both answer, and say when a connection is closed."""
    settings = make_settings({"host": "127.0.0.1", "port": 0})

    async def go() -> None:
        listener, stop = bind(settings.http), asyncio.Event()
        port = listener.getsockname()[1]
        dealer = ConnectionDealer(listener, tmp_path / "closed", 2)
        up: list[int] = []
        servers = []
        for index in range(2):
            hand = dealer.open(index)
            own = ConnectionHandle(hand.channel.dup(), hand.closed_file, index)
            engine = FakeEngine("abc")
            engine.facts = replace(engine.facts, model_names=(f"m{index}",))
            run = serve(
                settings,
                engine,
                hand=own,
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
