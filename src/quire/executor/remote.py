"""Ranks of other processes or machines, each group of which connects to the engine over TCP."""

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

from quire.errors import ConfigError
from quire.executor.crew import Heard
from quire.executor.orders import Gone, Word
from quire.logs import get_logger

log = get_logger(__name__)

GREETING_S = 10.0
"""For somebody who connects to say who it is."""
LOOK_S = 0.25
LONGEST = 1 << 30
"""Bytes of a message."""
_SILENCE_MS = 10_000
"""After which a machine that answers nothing counts as gone; the death of a process is noticed at once."""


class Join(msgspec.Struct, tag="join"):
    """Ranks somewhere are to be had."""

    node_rank: int
    settings: dict[str, str]
    """What all must agree on."""


class Said(msgspec.Struct, tag="said"):
    """A rank there said something."""

    index: int
    word: Word


class Answer(msgspec.Struct, tag="answer"):
    """The outcome of a step."""

    data: bytes


class Welcome(msgspec.Struct, tag="welcome"):
    """All are there: start your ranks."""

    meeting: str


class Tell(msgspec.Struct, tag="tell"):
    """An order for all ranks."""

    data: bytes


class Plan(msgspec.Struct, tag="plan"):
    """A plan for all ranks."""

    data: bytes


class End(msgspec.Struct, tag="end"):
    """It is over, and why; the empty string where nothing is wrong."""

    problem: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(Join | Said | Answer).decode
decode_from_head = msgspec.msgpack.Decoder(Welcome | Tell | Plan | End).decode


def interface_to(address: str) -> str:
    """The interface from which a machine is reached; empty if it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        own = probe.getsockname()[0]
    if own.startswith("127."):
        own = "127.0.0.1"
    found = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == own for each in addresses)
    )
    return next(found, "")


def tuned(sock: socket.socket) -> Connection:
    """Small messages at once; a machine that went away without a word is noticed."""
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
    """Who holds some of the ranks, as the engine sees it."""

    rank: int
    address: str
    pipe: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Any) -> None:
        with self.sending, contextlib.suppress(OSError):  # its end is heard by who listens to it
            self.pipe.send_bytes(encode(message))


class RemoteCrew:
    """Ranks behind connections, as many behind each, which come when they are up."""

    def __init__(
        self, listener: socket.socket, awaited: range, count: int, check: Callable[[Join], str | None]
    ) -> None:
        self.heard: Heard = queue.SimpleQueue()
        self.farewell: str | None = ""
        self.names: list[str] = []
        self.nodes: dict[int, Node] = {}
        self._listener = listener
        self._awaited = awaited
        self._count = count
        self._check = check
        """Says why somebody does not belong here."""
        self._outcomes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._problem: str | None = None
        self._is_complete = False
        self._news = threading.Condition()
        threading.Thread(target=self._accept, name="quire-nodes", daemon=True).start()

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self._awaited if rank not in self.nodes]

    def await_all(self, deadline: float, look: Callable[[], None] = lambda: None) -> bool:
        """Whether all have come in time. Raises what is wrong with one that came, or what `look` raises."""
        with self._news:
            while self.missing and self._problem is None:
                if time.monotonic() > deadline:
                    return False
                look()
                self._news.wait(LOOK_S)
            self._is_complete = self._problem is None
        if self._problem is not None:
            raise ConfigError(self._problem)
        return True

    def welcome(self, meeting: str) -> None:
        for node in self.nodes.values():
            node.send(Welcome(meeting))

    # ---- one thread for each connection

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            while True:
                sock, (address, *_) = self._listener.accept()
                given = tuned(sock), address
                threading.Thread(target=self._attend, args=given, name="quire-node", daemon=True).start()

    def _attend(self, pipe: Connection, address: str) -> None:
        """From the first word to the end."""
        node: Node | None = None
        try:
            first = decode_from_node(pipe.recv_bytes(LONGEST)) if pipe.poll(GREETING_S) else None
            if not isinstance(first, Join):
                return
            node = Node(first.node_rank, address, pipe)
            if (problem := self._admit(node, first)) is not None:
                node.send(End(problem))
                node = None
                return
            while True:
                self._take(node, decode_from_node(pipe.recv_bytes(LONGEST)))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            log.debug("The connection from %s ends: %r", address, error)
        finally:
            pipe.close()
            if node is not None:
                self._lose(node)

    def _admit(self, node: Node, join: Join) -> str | None:
        """Why not, if it does not belong here; while others are awaited that ends the start."""
        with self._news:
            problem = self._check(join)
            if problem is not None:
                problem = f"node {node.rank} ({node.address}) {problem}"
            elif node.rank in self.nodes:
                there = self.nodes[node.rank].address
                problem = f"two machines have --node-rank {node.rank}: {there} and {node.address}"
            if problem is None:
                self.nodes[node.rank] = node
            elif not self._is_complete:
                self._problem = problem
            self._news.notify_all()
        return problem

    def _take(self, node: Node, message: Any) -> None:
        if isinstance(message, Said):
            self.heard.put((node.rank * self._count + message.index, message.word))
        elif isinstance(message, Answer):
            self._outcomes.put(message.data)

    def _lose(self, node: Node) -> None:
        with self._news:
            if self.nodes.get(node.rank) is not node:
                return
            if not self._is_complete:  # it may come again while others are awaited
                log.warning("Node %d (%s) went away", node.rank, node.address)
                del self.nodes[node.rank]
                return
        why = f"the connection to node {node.rank} ({node.address}) is lost"
        for index in range(node.rank * self._count, (node.rank + 1) * self._count):
            self.heard.put((index, Gone(why)))

    # ---- as a crew

    def tell(self, order: bytes) -> None:
        for node in self.nodes.values():
            node.send(Tell(order))

    def send(self, plan: bytes, timeout_s: float) -> None:
        for node in self.nodes.values():
            node.send(Plan(plan))

    def receive(self, timeout_s: float) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._outcomes.get(timeout=max(timeout_s, 0.0))
        return None

    def end(self) -> None:
        with contextlib.suppress(OSError):  # who is in accept() wakes up
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        nodes, self.nodes = self.nodes, {}
        for node in nodes.values():
            if self.farewell is not None:
                node.send(End(self.farewell))
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(node.pipe.fileno())) as sock:
                sock.shutdown(socket.SHUT_WR)
