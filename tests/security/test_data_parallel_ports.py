"""Sockets between processes and machines: unknown peers reach the data-parallel ports and change nothing.

Guards against the classes of CVE-2025-30202 (sockets that any peer can reach) and CVE-2025-29783,
CVE-2025-32444 and CVE-2025-47277 (services between nodes that trust any connection)."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from ports import free_port

from quire.config.data_parallel import lay_out
from quire.config.sections import ParallelSection
from quire.core import clients as clients_module
from quire.core import dp_sync as lockstep_module
from quire.core.clients import Clients
from quire.core.dp_sync import Count, Lockstep, SyncHello
from quire.data.step_plan import StepPlan
from quire.data.wire import ControlCall, encode
from quire.data.wire import Hello as ClientHello
from quire.entrypoints.launch import Supervisor
from quire.errors import ConfigError
from quire.system import node_registry as roll_module
from quire.system.node_registry import Announcer, JoinNode, NodeRegistry
from quire.system.socket_security import secure

PATIENCE_S = 60.0
TOKEN = "the secret of the deployment"
NOISE = [
    b"",
    b"junk",
    b"here",
    b"bye",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xc1" * 100,
    b"\x93\x01\x02\x03",
    b"\x91\xa8x\nforged",
]

pack = msgspec.msgpack.encode


@pytest.fixture(params=[True, False], ids=["encrypted", "plain"])
def encrypted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether sockets are encrypted. If the ZMQ library has no CURVE, they are only protected by the
    token in each Hello message."""
    if not request.param:
        for module in (lockstep_module, clients_module, roll_module):
            monkeypatch.setattr(module, "secure", lambda *_, **__: None)
    return bool(request.param)


def until(is_done: Callable[[], object], *turns: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline
        for turn in turns:
            turn()
        time.sleep(0.002)


@contextmanager
def unknown_peer(address: str, token: str = "", identity: bytes = b"") -> Iterator["zmq.Socket[bytes]"]:
    """Connect a ZMQ peer that is unknown to the engines, with encryption if it has a token."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDTIMEO, 5000)
        if identity:
            sock.setsockopt(zmq.IDENTITY, identity)
        secure(sock, token, listens=False)
        sock.connect(address)
        yield sock


def connect_and_leave(address: str) -> None:
    """Connect and disconnect, as a port scan or a client of another protocol does."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as first:
        until(lambda: first.connect_ex((host, int(port))) == 0)
    for data in (b"\xff" + b"\0" * 8 + b"\x7f\x03", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port))) as probe:
            probe.sendall(data)


class Engines:
    """Engines in lockstep, one per thread; `ended` records the ranks that ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.size, self.address = size, f"tcp://127.0.0.1:{free_port()}"
        self.ended: list[int] = []
        self.steps: dict[int, Lockstep] = {}
        monkeypatch.setattr(Lockstep, "_end", lambda member: self.ended.append(member.rank))

    def open(self, *ranks: int) -> None:
        def meet(rank: int) -> None:
            self.steps[rank] = Lockstep(rank, self.size, self.address, token=TOKEN, timeout_s=PATIENCE_S)

        for rank in ranks:
            threading.Thread(target=meet, args=(rank,), daemon=True).start()

    def meet(self) -> None:
        until(lambda: len(self.steps) == self.size)

    def round(self, *counts: int) -> None:
        """Let all ranks take a step and exchange its counts."""
        seen: dict[int, Any] = {}

        def step(rank: int) -> None:
            plan = StepPlan.idle(0)
            plan.rows, plan.total_tokens = np.zeros(1, np.int32), counts[rank]
            agreed = self.steps[rank].join_round(plan)
            seen[rank] = agreed and agreed.counts

        threads = [threading.Thread(target=step, args=(rank,), daemon=True) for rank in self.steps]
        for thread in threads:
            thread.start()
        until(lambda: len(seen) == self.size)
        assert [*seen.values()] == [counts] * self.size

    def close(self) -> None:
        for lockstep in self.steps.values():
            lockstep.close()


@pytest.fixture
def engines(encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    made = Engines(monkeypatch)
    yield made
    made.close()


def offer(peer: "zmq.Socket[bytes]", message: bytes) -> None:
    """Send a message, unless the port has already closed the connection, as encrypted ports do."""
    with suppress(zmq.Again):
        peer.send(message, zmq.NOBLOCK)


def test_unknown_peer_at_the_sync_port_changes_nothing(
    engines: Engines, encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a port scan, random bytes, and counts and Hello messages of a peer without the token."""
    engines.open(0, 1)
    engines.meet()
    engines.round(3, 1)
    foreign = [pack(Count(7, 1)), pack(Count(1, 5)), pack(SyncHello(1, "")), pack(SyncHello(1, "guess"))]
    connect_and_leave(engines.address)
    with unknown_peer(engines.address) as plain, unknown_peer(engines.address, "guess") as other:
        named = unknown_peer(engines.address, identity=(1).to_bytes(4, "big"))
        with named as squatter:
            for message in [*NOISE, *foreign]:
                for peer in (plain, other, squatter):
                    offer(peer, message)
            for number in range(5):
                engines.round(number + 1, 2)
    time.sleep(0.6)  # a lost rank is noticed within half of that
    engines.round(1, 1)
    assert not engines.ended
    assert "\nforged" not in caplog.text
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if encrypted else 1), "one line, however much is sent"


def test_unknown_peer_cannot_take_the_place_of_an_engine(engines: Engines) -> None:
    engines.open(0)
    with unknown_peer(engines.address, identity=(1).to_bytes(4, "big")) as first, ExitStack() as stack:
        for message in (*NOISE, pack(SyncHello(1, "guess")), pack(Count(0, 1))):
            offer(first, message)
        connect_and_leave(engines.address)
        with_token = stack.enter_context(unknown_peer(engines.address, TOKEN))
        for rank in (0, 2, -1, 1 << 40):
            with_token.send(pack(SyncHello(rank, TOKEN)))
        time.sleep(0.3)
        assert not engines.steps, "the hub waits for the real engine"
        engines.open(1)
        engines.meet()
        engines.round(2, 4)
    assert not engines.ended


@pytest.mark.parametrize("victim", [0, 1])
def test_lost_engine_is_noticed_despite_unknown_peers(engines: Engines, victim: int) -> None:
    engines.open(0, 1)
    engines.meet()
    with unknown_peer(engines.address) as peer:
        peer.send(b"junk")
        connect_and_leave(engines.address)
        engines.steps[victim].abandon()
        until(lambda: engines.ended == [1 - victim])


def test_engine_with_another_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_module, "SLICE_MS", 100)
    engines = Engines(monkeypatch)
    engines.open(0)
    for token in ("", "guess"):
        with pytest.raises(ConfigError, match="QUIRE_CLUSTER_TOKEN must be the same on every machine"):
            Lockstep(1, 2, engines.address, token=token, timeout_s=PATIENCE_S)
    engines.open(1)
    engines.meet()
    engines.close()


# ---- the head's registry of nodes


@pytest.fixture
def roll(tmp_path: Path, encrypted: bool) -> Iterator[NodeRegistry]:
    made = NodeRegistry("127.0.0.1", free_port(), size=2, awaited=(1,), folder=tmp_path, token=TOKEN)
    yield made
    made.close()


def test_node_without_the_token_registers_no_rank(roll: NodeRegistry, tmp_path: Path) -> None:
    host, _, port = roll._place.rpartition(":")
    for token in ("", "guess"):
        node = Announcer(host, int(port), size=2, addresses={1: "tcp://10.9.9.9:1"}, token=token)
        with pytest.raises(ConfigError, match=r"refused.*QUIRE_CLUSTER_TOKEN differs: set the same secret"):
            until(lambda: False, roll.listen, lambda: node.tick(is_up=True, timeout_s=PATIENCE_S))  # noqa: B023
        node.close()
    assert roll.missing == [1] and not NodeRegistry.file_of(tmp_path, 1).exists()
    real = Announcer(host, int(port), size=2, addresses={1: "tcp://10.0.0.1:4001"}, token=TOKEN)
    until(lambda: roll.was_complete, roll.listen, lambda: real.tick(is_up=True, timeout_s=PATIENCE_S))
    assert NodeRegistry.file_of(tmp_path, 1).read_text() == "tcp://10.0.0.1:4001"
    real.close()


@pytest.mark.parametrize(
    "address",
    ["tcp://one", "ipc:///tmp/other", "tcp://a:1\n", "inproc://x", "tcp://h:99999999", "", "x" * 9999],
)
def test_only_engine_core_addresses_are_registered(roll: NodeRegistry, tmp_path: Path, address: str) -> None:
    noted = roll._register(b"node", JoinNode("node", 2, TOKEN, {1: address}))
    assert (
        "is not an address of a core: expected tcp://HOST:PORT" in noted.problem and len(noted.problem) < 200
    )
    assert roll.missing == [1] and not NodeRegistry.file_of(tmp_path, 1).exists()


@pytest.mark.parametrize("flags", [{}, {"enable_expert_parallel": True}, {"data_parallel_rank": 1}])
def test_processes_of_one_command_share_a_random_token(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configured token is only used for engine cores of other commands."""
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "of all machines")
    tokens = {token_of(data_parallel_size=2, **flags) for _ in range(2)}
    assert len(tokens) == 2 and all(len(token) >= 32 for token in tokens)


@pytest.mark.parametrize(
    "flags",
    [
        {"data_parallel_size_local": 1},
        {"data_parallel_size_local": 1, "data_parallel_start_rank": 1, "headless": True},
        {"data_parallel_rank": 1, "enable_expert_parallel": True},
    ],
)
def test_commands_of_one_deployment_use_the_configured_token(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "of all machines")
    assert token_of(data_parallel_size=2, **flags) == "of all machines"


def token_of(*, headless: bool = False, **settings: Any) -> str:
    """Return the token that a supervisor with these settings chooses."""
    parallel = ParallelSection(device="cpu", cpu_threads=1, **settings)
    supervisor = Supervisor.__new__(Supervisor)
    supervisor.config = SimpleNamespace(parallel=parallel)  # type: ignore[assignment]
    supervisor.topology = lay_out(parallel, headless=headless, api_server_count=None)
    return supervisor._choose_token()


# ---- the port of an engine core


def test_engine_core_ignores_peers_without_the_token(encrypted: bool) -> None:
    """Only API processes of the deployment may send worker calls to an engine core."""
    address = f"tcp://127.0.0.1:{free_port()}"
    clients = Clients(address, lambda _: None, token=TOKEN)
    call = encode(ControlCall(1, "collective_rpc", {"method": "report"}))
    with ExitStack() as stack:
        peers = [stack.enter_context(unknown_peer(address, token)) for token in ("", "guess")]
        for peer in peers:
            for message in (call, encode(ClientHello()), encode(ClientHello("guess")), call, *NOISE):
                peer.send(message)
        connect_and_leave(address)
        api = stack.enter_context(unknown_peer(address, TOKEN if encrypted else ""))
        api.send(call)
        api.send(encode(ClientHello(TOKEN)))
        api.send(call)
        received: list[Any] = []
        until(lambda: len(received) == 2, lambda: received.append(clients.receive()) or _compact(received))
        time.sleep(0.1)
        assert clients.receive() is None
        assert [type(message) for _, message in received] == [ClientHello, ControlCall]
        assert len(clients.known) == 1
    clients.close()


def _compact(received: list[Any]) -> None:
    received[:] = [message for message in received if message is not None]
