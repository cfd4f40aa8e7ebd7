"""Ranks in other processes or on other machines, which connect to the engine over TCP."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil

from quire.executor.messages import FromRank, RankEnded
from quire.executor.worker_group import MessageQueue
from quire.logs import FirstWarning, get_logger
from quire.system.cluster_token import VARIABLE, is_same

log = get_logger(__name__)

JOIN_TIMEOUT_S = 10.0
"""Time limit for the first message of a connection, in seconds."""
LOOK_S = 0.25
"""Seconds between two checks in loops that wait for nodes or ranks."""
LONGEST = 1 << 30
"""Size limit of a message between admitted machines, in bytes."""
MAX_JOIN_BYTES = 64 << 10
"""Size limit of the first message of a connection, before its sender is authenticated."""
MAX_UNADMITTED = 64
"""Largest number of connections without a first message; further connections are closed."""
RETRY_S = 0.1
"""Pause after a connection could not be accepted, for example without free file descriptors."""
_SILENCE_MS = 10_000
"""Milliseconds without an answer after which a machine counts as lost. The end of a process is noticed at
once."""
_OTHER_TOKEN = f"{VARIABLE} must be the same on every machine"


class Join(msgspec.Struct, tag="join"):
    """Message of a node: it offers to run ranks."""

    node_rank: int
    settings: dict[str, str]
    """Settings that must be the same on all machines."""
    token: str = ""
    """The secret of the deployment."""


class RankMessage(msgspec.Struct, tag="rank"):
    """Message of a node: a message of one of its ranks."""

    index: int
    content: FromRank


class StepAnswer(msgspec.Struct, tag="answer"):
    """Message of a node: the encoded outcome of a step."""

    data: bytes


class Welcome(msgspec.Struct, tag="welcome"):
    """Message to a node: all nodes are connected, so that it starts its ranks."""

    init_method: str


class OrderMessage(msgspec.Struct, tag="order"):
    """Message to a node: an order for all its ranks."""

    data: bytes


class PlanMessage(msgspec.Struct, tag="plan"):
    """Message to a node: a plan for all its ranks."""

    data: bytes


class HeadEnd(msgspec.Struct, tag="end"):
    """Message to a node: the engine ends."""

    problem: str = ""
    """Reason of the end; empty for a normal end."""
    is_final: bool = False
    """Whether the node must not reconnect: its configuration is wrong."""


encode = msgspec.msgpack.Encoder().encode
decode_join = msgspec.msgpack.Decoder(Join).decode
decode_from_node = msgspec.msgpack.Decoder(Join | RankMessage | StepAnswer).decode
decode_from_head = msgspec.msgpack.Decoder(Welcome | OrderMessage | PlanMessage | HeadEnd).decode


def interface_to(address: str) -> str:
    """Return the network interface that reaches a host name or an IPv4 address; empty if it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        source = probe.getsockname()[0]
    if source.startswith("127."):
        source = "127.0.0.1"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == source for entry in addresses):
            return name
    return ""


def first_message(sock: socket.socket) -> bytes:
    """Return the first message of an unauthenticated connection. Raise OSError if it is larger than
    `MAX_JOIN_BYTES`, or not complete within `JOIN_TIMEOUT_S`.

    The framing is that of `Connection`: four bytes of length, then the message.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    size = int.from_bytes(_read_exactly(sock, 4, deadline), "big")
    if size > MAX_JOIN_BYTES:
        raise OSError(f"its first message has {size} bytes, the limit is {MAX_JOIN_BYTES}")
    return _read_exactly(sock, size, deadline)


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (piece := sock.recv(size - len(data))):
            raise EOFError("the connection ended within its first message")
        data += piece
    return data


def configure_socket(sock: socket.socket) -> Connection:
    """Configure a connection: small messages are sent at once, and a lost machine is noticed."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    return Connection(sock.detach())


@dataclass
class Node:
    """A node with some of the ranks, and the connection to it."""

    rank: int
    address: str
    pipe: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Any) -> None:
        with self.sending, contextlib.suppress(OSError):  # the reading thread notices the end
            self.pipe.send_bytes(encode(message))


class RemoteRanks:
    """A worker group on other nodes, reached over TCP, with the same number of ranks on each node."""

    def __init__(
        self,
        listener: socket.socket,
        awaited: range,
        count: int,
        *,
        token: str,
        check: Callable[[Join], str | None] = lambda join: None,
    ) -> None:
        """Begin to accept the nodes with the node ranks `awaited`, which run `count` worker ranks each.
        `check` returns what is wrong with a node that has the token, or None."""
        self.messages: MessageQueue = queue.SimpleQueue()
        self.end_reason: str | None = ""
        self.names: list[str] = []
        self.nodes: dict[int, Node] = {}
        self._listener = listener
        self._awaited = awaited
        self._count = count
        self._token = token
        self._check = check
        self._outcomes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_complete = self._is_ended = False
        self._refusals: dict[int, str] = {}
        """Reason why the last node with the token was refused, by node rank."""
        self._unadmitted = threading.Semaphore(MAX_UNADMITTED)
        self._warn = FirstWarning(log, "At the port for other machines")
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="quire-nodes", daemon=True).start()

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self._awaited if rank not in self.nodes]

    @property
    def refusals(self) -> str:
        """Return, for an error message, why nodes with the numbers of the missing nodes were refused."""
        return "".join(f"; {self._refusals[rank]}" for rank in self.missing if rank in self._refusals)

    def await_all(self, deadline: float, check: Callable[[], None] = lambda: None) -> bool:
        """Wait for all nodes; return whether they have connected in time. `check` may raise."""
        with self._changed:
            while self.missing:
                if time.monotonic() > deadline:
                    return False
                check()
                self._changed.wait(LOOK_S)
            self._is_complete = True
        return True

    def welcome(self, init_method: str) -> None:
        for node in self.nodes.values():
            node.send(Welcome(init_method))

    # ---- one thread for each connection

    def _accept(self) -> None:
        """Accept connections until the listener is closed, despite errors of single connections."""
        while self._listener.fileno() >= 0:
            try:
                sock, (address, *_) = self._listener.accept()
            except OSError as error:
                if self._is_ended:
                    return
                self._warn(f"a connection could not be accepted: {error}")
                time.sleep(RETRY_S)
                continue
            if not self._unadmitted.acquire(blocking=False):
                self._warn(f"{address} is refused: {MAX_UNADMITTED} connections have not sent a message yet")
                sock.close()
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(sock, address), name="quire-node", daemon=True
                ).start()
            except RuntimeError as error:
                self._unadmitted.release()
                self._warn(f"{address} is refused: {error}")
                sock.close()

    def _serve(self, sock: socket.socket, address: str) -> None:
        """Handle one connection: admit the node by its first message, then queue the messages of its ranks
        until it ends."""
        node: Node | None = None
        try:
            node = self._receive_join(sock, address)
            while node is not None:
                self._handle(node, decode_from_node(node.pipe.recv_bytes(LONGEST)))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            log.debug("The connection of the machine at %s closed: %r", address, error)
        finally:
            if node is not None:
                node.pipe.close()
                self._handle_lost(node)

    def _receive_join(self, sock: socket.socket, address: str) -> Node | None:
        """Read the first message; return the node if it is admitted, else send the reason and close."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._unadmitted.release)
            stack.callback(sock.close)
            try:
                join = decode_join(first_message(sock))
            except (EOFError, OSError, msgspec.MsgspecError) as error:
                self._warn(f"{address} did not join: {str(error)!r:.200}")
                return None
            node = Node(join.node_rank, address, configure_socket(sock))
            if (refusal := self._admit(node, join)) is None:
                return node
            node.send(refusal)
            node.pipe.close()
            return None

    def _admit(self, node: Node, join: Join) -> HeadEnd | None:
        """Add a node to the group; return the reason if it is refused, else None."""
        if not is_same(join.token, self._token):
            self._warn(f"{node.address} is refused: its {VARIABLE} differs")
            return HeadEnd(f"the first machine refused this one: {_OTHER_TOKEN}", is_final=True)
        with self._changed:
            wrong = self._check(join)
            if wrong is None and node.rank not in self._awaited:
                wrong = "is not one of the expected nodes"
            if wrong is None and node.rank not in self.nodes:
                self.nodes[node.rank] = node
                self._changed.notify_all()
                return None
            problem = f"node {node.rank} ({node.address}) {wrong}"
            if wrong is None:
                there = self.nodes[node.rank].address
                problem = f"two machines have --node-rank {node.rank}: {there} and {node.address}"
            self._refusals[node.rank] = problem
        log.error("Refused the connection of another node: %s", problem)
        return HeadEnd(problem, is_final=wrong is not None)

    def _handle(self, node: Node, message: Any) -> None:
        if isinstance(message, RankMessage):
            self.messages.put((node.rank * self._count + message.index, message.content))
        elif isinstance(message, StepAnswer):
            self._outcomes.put(message.data)

    def _handle_lost(self, node: Node) -> None:
        with self._changed:
            if self.nodes.get(node.rank) is not node:
                return
            if not self._is_complete:  # the node may reconnect until all nodes are there
                log.warning("Node %d (%s) disconnected; waiting for it to return", node.rank, node.address)
                del self.nodes[node.rank]
                return
        reason = f"the connection to node {node.rank} ({node.address}) is lost"
        for index in range(node.rank * self._count, (node.rank + 1) * self._count):
            self.messages.put((index, RankEnded(reason)))

    # ---- as a worker group

    def send_order(self, order: bytes) -> None:
        for node in self.nodes.values():
            node.send(OrderMessage(order))

    def send(self, plan: bytes, timeout_s: float) -> None:
        for node in self.nodes.values():
            node.send(PlanMessage(plan))

    def receive(self, timeout_s: float) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._outcomes.get(timeout=max(timeout_s, 0.0))
        return None

    def end(self) -> None:
        self._is_ended = True
        with contextlib.suppress(OSError):  # wakes up the thread in accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        nodes, self.nodes = self.nodes, {}
        for node in nodes.values():
            if self.end_reason is not None:
                node.send(HeadEnd(self.end_reason))
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(node.pipe.fileno())) as sock:
                sock.shutdown(socket.SHUT_WR)
