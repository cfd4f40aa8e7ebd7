"""The registry of engine cores on other machines: their supervisors announce them to the head node."""

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from quire.errors import ConfigError
from quire.logs import FirstWarning, get_logger
from quire.system.cluster_token import VARIABLE, is_same
from quire.system.socket_security import FAILURES, MISMATCHES, Handshakes, events_of, secure

log = get_logger(__name__)

ENLIST_S = 0.5
"""Seconds between two messages of a node to the head; a message and its answer are the heartbeats."""
GONE_S = 3.0
"""Seconds without a message of a node after which another node may take its ranks."""
REMIND_S = 30.0
"""Seconds between two log lines about missing ranks."""
MAX_AT_ONCE = 256
"""Most messages of nodes to read before the supervisor checks its child processes again."""
MAX_BYTES = 1 << 20
"""Size limit of a message in bytes; ZMQ closes connections that send a larger one."""
_LINGER_MS = 1000
_ADDRESS = re.compile(r"tcp://(\[[\w:.%]+\]|[\w.-]+):\d{1,5}")


_OTHER_TOKEN = f"its {VARIABLE} differs: set the same secret on every machine"


class JoinNode(msgspec.Struct, tag="enlist"):
    """Message of a node to the head: the addresses of its engine cores, and whether they are up or why
    they cannot start."""

    node: str
    size: int
    token: str
    """The cluster token, which all processes of a deployment share."""
    addresses: dict[int, str]
    is_up: bool = False
    problem: str = ""


class NodeJoined(msgspec.Struct, tag="noted"):
    """Answer of the head to a `JoinNode`. With an empty `problem` the node is accepted; `ends` means that
    the head itself is shutting down."""

    problem: str = ""
    ends: bool = False
    may_change: bool = False
    """Whether a refused node may retry, since the node that has its data-parallel rank may be dead."""


@dataclass(slots=True)
class _Node:
    name: str
    ranks: frozenset[int]
    heard_at: float
    is_up: bool


class NodeRegistry:
    """The head's list of the engine cores on other machines. It writes their addresses to files in
    `folder`, where API processes read them."""

    def __init__(
        self, host: str, port: int, *, size: int, awaited: Iterable[int], folder: Path, token: str
    ) -> None:
        self.size = size
        self._token = token
        self._ignore = FirstWarning(log, f"Ignored at {host}:{port}")
        self.folder = folder
        self.awaited = frozenset(awaited)
        self.was_complete = False
        """Whether all data-parallel ranks have been up at the same time."""
        self._place = f"{host}:{port}"
        self._nodes: dict[bytes, _Node] = {}
        self._remind_at = time.monotonic() + REMIND_S
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        secure(self._socket, token, listens=True)
        try:
            self._socket.bind(f"tcp://{self._place}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen on {self._place} for data-parallel ranks: {error.strerror}; choose another"
                " --data-parallel-address or --data-parallel-rpc-port"
            ) from None

    @staticmethod
    def file_of(folder: Path, rank: int) -> Path:
        return folder / f"address{rank}"

    @property
    def missing(self) -> list[int]:
        up = frozenset().union(*(node.ranks for node in self._nodes.values() if node.is_up))
        return sorted(self.awaited - up)

    def listen(self) -> None:
        """Read the waiting messages of nodes and answer them, without waiting. Raise a ConfigError if a
        registered node fails before all ranks have been up."""
        for _ in range(MAX_AT_ONCE):
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = msgspec.msgpack.decode(b"".join(parts), type=JoinNode)
            except msgspec.MsgspecError:
                self._ignore("a message that is not of this version")
                continue
            if not is_same(message.token, self._token):
                self._ignore("a machine with another token")
                self._send(identity, NodeJoined(_OTHER_TOKEN))
                continue
            answer = self._register(identity, message)
            self._send(identity, answer)
            if answer.problem:
                log.error("Refused to register the machine %.100r: %s", message.node, answer.problem)
        self._check_complete()

    def _send(self, identity: bytes, message: NodeJoined) -> None:
        self._socket.send_multipart([identity, msgspec.msgpack.encode(message)])

    def _register(self, identity: bytes, message: JoinNode) -> NodeJoined:
        """Register a node and store the addresses of its cores, or return why the node is refused."""
        if message.problem:
            if identity in self._nodes and not self.was_complete:
                raise ConfigError(f"{message.node}: {message.problem}")
            log.error("Node %s is shutting down: %s", message.node, message.problem)
            return NodeJoined()
        if message.size != self.size:
            return NodeJoined(
                f"data_parallel_size is {self.size} at the head, and {message.size} at {message.node}"
            )
        if unexpected := sorted(message.addresses.keys() - self.awaited):
            return NodeJoined(
                f"data-parallel rank {unexpected[0]} runs at the head itself, or is out of range"
            )
        if bad := [address for address in message.addresses.values() if not _ADDRESS.fullmatch(address)]:
            return NodeJoined(f"{bad[0]!r:.80} is not an address of a core: expected tcp://HOST:PORT")
        now = time.monotonic()
        for other, node in list(self._nodes.items()):
            shared = node.ranks & message.addresses.keys()
            if other == identity or not shared:
                continue
            if now - node.heard_at < GONE_S:
                return NodeJoined(
                    f"data-parallel rank {min(shared)} is taken by {node.name}", may_change=True
                )
            del self._nodes[other]
        known = self._nodes.get(identity)
        self._nodes[identity] = _Node(message.node, frozenset(message.addresses), now, message.is_up)
        if known is None:
            log.info("Data-parallel ranks %s run on node %s", _listed(message.addresses), message.node)
            for rank, address in message.addresses.items():
                file = self.file_of(self.folder, rank)
                file.with_suffix(".new").write_text(address)
                file.with_suffix(".new").rename(file)
        return NodeJoined()

    def _check_complete(self) -> None:
        if self.was_complete:
            return
        missing, now = self.missing, time.monotonic()
        if not missing:
            self.was_complete = True
            log.info("All %d data-parallel ranks are up", self.size)
        elif now >= self._remind_at:
            self._remind_at = now + REMIND_S
            log.info("Waiting at %s for nodes with data-parallel ranks %s", self._place, _listed(missing))

    def overdue(self, timeout_s: float) -> str:
        return (
            f"data-parallel ranks {_listed(self.missing)} were not up within {timeout_s:g} s: start them with"
            f" --headless, with this server's --data-parallel-address and --data-parallel-rpc-port"
            f" ({self._place})"
        )

    def close(self, problem: str = "") -> None:
        """Notify all nodes that the head shuts down, with the reason `problem`, and close the socket."""
        for identity in self._nodes:
            self._send(identity, NodeJoined(problem, ends=True))
        self._socket.close()
        self._context.term()  # waits until the messages are sent


class Announcer:
    """Announces the engine cores of this machine to the head node, by periodic heartbeats."""

    def __init__(self, host: str, port: int, *, size: int, addresses: Mapping[int, str], token: str) -> None:
        self.head = f"{host}:{port}"
        self.was_heard = False
        self.ends = False
        """Whether the head has shut down or has refused this node, so that this node shuts down as well."""
        self._message = JoinNode(f"{socket.gethostname()} (pid {os.getpid()})", size, token, dict(addresses))
        self._began = self._heard_at = time.monotonic()
        self._next = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 1)  # a head that starts late needs the latest message only
        self._handshakes = Handshakes()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURES | MISMATCHES)
        secure(self._socket, token, listens=False)
        self._socket.connect(f"tcp://{self.head}")

    def tick(self, *, is_up: bool, timeout_s: float) -> None:
        """Send a heartbeat if one is due, and read the answers of the head, without waiting. Raise a
        ConfigError if the head refuses this node or does not answer within `timeout_s` seconds."""
        now = time.monotonic()
        self._check_handshakes()
        self._receive(now)
        if now - self._heard_at > timeout_s:
            what = "has been silent for" if self.was_heard else "did not answer within"
            raise ConfigError(f"the head of the data-parallel ranks at {self.head} {what} {timeout_s:g} s")
        if now >= self._next:
            self._next = now + ENLIST_S
            self._message.is_up = is_up
            self._send()

    def _check_handshakes(self) -> None:
        for event, _ in events_of(self._monitor):
            self._handshakes.note(event)
        if self._handshakes.is_refused and not self.was_heard:
            self.ends = True
            raise ConfigError(f"the head at {self.head} refused this machine: {_OTHER_TOKEN}")

    def _receive(self, now: float) -> None:
        while self._socket.poll(0):
            try:
                answer = msgspec.msgpack.decode(self._socket.recv(), type=NodeJoined)
            except msgspec.MsgspecError as error:
                log.warning(
                    "Ignored an invalid message of the head node at %s: %.200r", self.head, str(error)
                )
                continue
            self._heard_at = now
            if answer.may_change and now - self._began < 2 * GONE_S:
                continue
            if answer.problem:
                self.ends = True
                how = "ended" if answer.ends else "refused"
                raise ConfigError(f"the head at {self.head} {how}: {answer.problem}")
            self.ends = self.ends or answer.ends
            if not self.was_heard:
                log.info("The head node at %s has registered data-parallel ranks %s", self.head, self._ranks)
            self.was_heard = True

    @property
    def _ranks(self) -> str:
        return _listed(self._message.addresses)

    def _send(self) -> None:
        try:
            self._socket.send(msgspec.msgpack.encode(self._message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("The head node at %s is not reachable yet", self.head)

    def close(self, problem: str = "") -> None:
        """Close the connection; report `problem` to the head if this node cannot run its cores."""
        if problem and not self.ends:
            self._message.problem = problem
            self._send()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


def own_address(head: str, address: str | None) -> str:
    """Return the IP address or host name at which the head reaches this machine: `address`, or that of the
    network interface to the head."""
    if address:
        return address
    with socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, 9))
        except OSError as error:
            raise ConfigError(f"data_parallel_address={head!r} cannot be reached: {error}") from None
        return str(probe.getsockname()[0])


def free_address(host: str) -> str:
    """Return a tcp:// address with a free port of `host`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"tcp://{f'[{host}]' if ':' in host else host}:{probe.getsockname()[1]}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
