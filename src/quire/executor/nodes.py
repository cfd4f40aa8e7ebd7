"""Ranks on several machines: the crew of the first one, and what the others run in place of a server."""

import contextlib
import hashlib
import os
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.errors import ConfigError
from quire.executor.crew import Heard, LocalCrew
from quire.executor.orders import Gone, Word
from quire.executor.rank import own_places, world_size
from quire.logs import get_logger
from quire.version import __version__

log = get_logger(__name__)

RETRY_S = 0.5
GREETING_S = 10.0
"""For somebody who connects to say who it is."""
LOOK_S = 0.25
_LONGEST = 1 << 30
_SILENCE_MS = 10_000
"""After which a machine that answers nothing counts as gone; the death of a process is noticed at once."""


# ---- what they say to each other


class Join(msgspec.Struct, tag="join"):
    """A machine is there."""

    node_rank: int
    settings: dict[str, str]
    """What all machines must agree on."""


class Said(msgspec.Struct, tag="said"):
    """A rank there said something."""

    index: int
    word: Word


class Answer(msgspec.Struct, tag="answer"):
    """The outcome of a step."""

    data: bytes


class Welcome(msgspec.Struct, tag="welcome"):
    """All machines are there: start your ranks."""

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


_encode = msgspec.msgpack.Encoder().encode
_from_node = msgspec.msgpack.Decoder(Join | Said | Answer).decode
_from_head = msgspec.msgpack.Decoder(Welcome | Tell | Plan | End).decode


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """What must be the same on every machine, in words that can be compared and shown."""
    parallel = {
        name: getattr(config.parallel, name)
        for name in ("nnodes", "tensor_parallel_size", "pipeline_parallel_size", "pp_layer_partition")
    }
    model = {
        name: getattr(config.model, name)
        for name in ("dtype", "quantization", "max_model_len", "seed", "logprobs_mode", "enforce_eager")
    }
    facts = hashlib.sha256(repr(config.checkpoint.facts).encode()).hexdigest()[:12]
    named = {
        "version": __version__,
        "model": f"{config.checkpoint.facts.architecture} ({facts})",
        "device": config.machine.device,
        "block_size": config.cache.block_size,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
    }
    return {name: str(value) for name, value in (named | model | parallel).items()}


def use_interface_to(address: str) -> None:
    """Have Gloo use the interface from which that machine is reached; what the user set stays."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return
    if own.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _tuned(sock: socket.socket) -> Connection:
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


# ---- the first machine


@dataclass
class _Node:
    """Another machine, as the first one sees it."""

    rank: int
    address: str
    pipe: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Any) -> None:
        with self.sending, contextlib.suppress(OSError):  # its end is heard by who listens to it
            self.pipe.send_bytes(_encode(message))


class NodesCrew:
    """Own ranks as children, those of other machines through their agents, which come when they are up."""

    def __init__(self, config: EngineConfig, timeout_s: float) -> None:
        parallel = config.parallel
        self.config = config
        self.heard: Heard = queue.SimpleQueue()
        self.farewell: str | None = ""
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._settings = shared_settings(config)
        self._count = world_size(parallel) // parallel.nnodes
        self._nodes: dict[int, _Node] = {}
        self._problem: str | None = None
        self._news = threading.Condition()
        self._local: LocalCrew | None = None
        self._listener = self._listen()
        threading.Thread(target=self._accept, name="quire-nodes", daemon=True).start()
        try:
            self._await_all(time.monotonic() + timeout_s, timeout_s)
        except BaseException as error:
            self.farewell = str(error)
            self.end()
            raise
        use_interface_to(parallel.master_addr)
        with socket.socket() as free:
            free.bind((parallel.master_addr, 0))
            meeting = f"tcp://{parallel.master_addr}:{free.getsockname()[1]}"
        places = [own_places(config, node_rank, meeting) for node_rank in range(parallel.nnodes)]
        self.names = [place.name for each in places for place in each]
        self._answers_here = any(place.answers for place in places[0])
        for node in self._nodes.values():
            node.send(Welcome(meeting))
        self._local = LocalCrew(places[0], self.heard)

    def _listen(self) -> socket.socket:
        where = self.config.parallel.master_addr, self.config.parallel.master_port
        try:
            return socket.create_server(where, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"the engine cannot listen for other machines on {where[0]}:{where[1]} ({os.strerror(error.errno or 0)}):"
                " give a free --master-port, and this machine's own address as --master-addr"
            ) from error

    def _await_all(self, deadline: float, timeout_s: float) -> None:
        parallel = self.config.parallel
        log.info(
            "Waiting for %d other machines at %s:%d",
            parallel.nnodes - 1,
            parallel.master_addr,
            parallel.master_port,
        )
        with self._news:
            while len(self._nodes) < parallel.nnodes - 1 and self._problem is None:
                if time.monotonic() > deadline:
                    missing = [str(rank) for rank in range(1, parallel.nnodes) if rank not in self._nodes]
                    raise ConfigError(
                        f"no word from node {', '.join(missing)} of {parallel.nnodes} within {timeout_s:g} s "
                        f"(VLLM_ENGINE_READY_TIMEOUT_S): start it with --node-rank and the same --nnodes, "
                        f"--master-addr and --master-port"
                    )
                self._news.wait(LOOK_S)
        if self._problem is not None:
            raise ConfigError(self._problem)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            while True:
                sock, (address, *_) = self._listener.accept()
                threading.Thread(
                    target=self._attend, args=(_tuned(sock), address), name="quire-node", daemon=True
                ).start()

    def _attend(self, pipe: Connection, address: str) -> None:
        """One connection, from its first word to its end."""
        node: _Node | None = None
        try:
            if not pipe.poll(GREETING_S) or not isinstance(
                first := _from_node(pipe.recv_bytes(_LONGEST)), Join
            ):
                return
            node = _Node(first.node_rank, address, pipe)
            if (problem := self._admit(node, first)) is not None:
                node.send(End(problem))
                node = None
                return
            while True:
                self._take(node, _from_node(pipe.recv_bytes(_LONGEST)))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            log.debug("The connection from %s ends: %r", address, error)
        finally:
            pipe.close()
            if node is not None:
                self._lose(node)

    def _admit(self, node: _Node, join: Join) -> str | None:
        """Why not, if it does not belong here; while others are awaited that ends the start."""
        own, nnodes = self._settings, self.config.parallel.nnodes
        differ = [name for name in own | join.settings if own.get(name) != join.settings.get(name)]
        with self._news:
            problem = None
            if differ:
                name = min(differ, key=lambda each: (each != "version", each != "nnodes", each))
                problem = (
                    f"node {node.rank} ({node.address}) was started with {name}={join.settings.get(name)},"
                    f" and the first with {name}={own.get(name)}: start all with the same"
                )
            elif not 0 < node.rank < nnodes:
                problem = f"node rank {node.rank} is not one of 1 to {nnodes - 1}"
            elif node.rank in self._nodes:
                problem = (
                    f"two machines have --node-rank {node.rank}: {self._nodes[node.rank].address} and"
                    f" {node.address}; give each its own"
                )
            if problem is None:
                log.info("Node %d is there (%s)", node.rank, node.address)
                self._nodes[node.rank] = node
            elif self._local is None:
                self._problem = problem
            self._news.notify_all()
        return problem

    def _take(self, node: _Node, message: Any) -> None:
        if isinstance(message, Said):
            self.heard.put((node.rank * self._count + message.index, message.word))
        elif isinstance(message, Answer):
            self._answers.put(message.data)

    def _lose(self, node: _Node) -> None:
        with self._news:
            if self._nodes.get(node.rank) is not node:
                return
            if self._local is None and self._problem is None:  # it may come again while others are awaited
                log.warning("Node %d (%s) went away", node.rank, node.address)
                del self._nodes[node.rank]
                return
        why = f"the connection to node {node.rank} ({node.address}) is lost"
        for index in range(node.rank * self._count, (node.rank + 1) * self._count):
            self.heard.put((index, Gone(why)))

    # ---- as a crew

    def tell(self, order: bytes) -> None:
        for node in self._nodes.values():
            node.send(Tell(order))
        assert self._local is not None
        self._local.tell(order)

    def send(self, plan: bytes, timeout_s: float) -> None:
        for node in self._nodes.values():
            node.send(Plan(plan))
        assert self._local is not None
        self._local.send(plan, timeout_s)

    def receive(self, timeout_s: float) -> bytes | None:
        if self._answers_here and self._local is not None:
            return self._local.receive(timeout_s)
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(timeout_s, 0.0))
        return None

    def end(self) -> None:
        with contextlib.suppress(OSError):  # who is in accept() wakes up
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            if self.farewell is not None:
                node.send(End(self.farewell))
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(node.pipe.fileno())) as sock:
                sock.shutdown(socket.SHUT_WR)
        if self._local is not None:
            self._local.end()


# ---- the other machines


class NodeAgent:
    """Runs this machine's ranks for the engine on the first one; comes again when that is started again."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.timeout_s = Env.read(os.environ).engine_ready_timeout_s
        self.was_up = False
        self.stopping = False
        self._crew: LocalCrew | None = None

    def run(self) -> int:
        """Until the engine ends, or a signal. The exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            while (end := self._serve(self._connect())) is None or (end.problem and self.was_up):
                log.error("The engine at the first machine ended%s", f": {end.problem}" if end else "")
            if end.problem:
                raise ConfigError(end.problem)
            return 0
        except KeyboardInterrupt:
            return 0
        finally:
            self._end_ranks()

    def _on_signal(self, *_: object) -> None:
        raise KeyboardInterrupt

    def _connect(self) -> Connection:
        """However long the first machine takes, up to the deadline."""
        parallel, deadline = self.config.parallel, time.monotonic() + self.timeout_s
        where = parallel.master_addr, parallel.master_port
        log.info("Node %d looks for the engine at %s:%d", parallel.node_rank, *where)
        while time.monotonic() < deadline:
            try:
                return _tuned(socket.create_connection(where, timeout=GREETING_S))
            except OSError:
                time.sleep(RETRY_S)
        raise ConfigError(
            f"no engine at {where[0]}:{where[1]} within {self.timeout_s:g} s (VLLM_ENGINE_READY_TIMEOUT_S):"
            " start the first machine with --node-rank 0, or correct --master-addr and --master-port"
        )

    def _serve(self, head: Connection) -> End | None:
        """Until it ends; None if it went away."""
        sending = threading.Lock()

        def send(message: Any) -> None:
            with sending, contextlib.suppress(OSError):
                head.send_bytes(_encode(message))

        try:
            send(Join(self.config.parallel.node_rank, shared_settings(self.config)))
            while True:
                match _from_head(head.recv_bytes(_LONGEST)):
                    case Welcome(meeting):
                        self._start_ranks(meeting, send)
                    case Tell(data):
                        self._ranks.tell(data)
                    case Plan(data):
                        self.was_up = True
                        self._ranks.send(data, self.timeout_s)
                    case End() as end:
                        return end
        except (EOFError, ConnectionError):
            return None
        finally:
            self._end_ranks()
            head.close()

    @property
    def _ranks(self) -> LocalCrew:
        assert self._crew is not None, "Welcome comes first"
        return self._crew

    def _start_ranks(self, meeting: str, send: Any) -> None:
        use_interface_to(self.config.parallel.master_addr)
        places = own_places(self.config, self.config.parallel.node_rank, meeting)
        crew = self._crew = LocalCrew(places)

        def relay_words() -> None:
            while self._crew is crew:
                with contextlib.suppress(queue.Empty):
                    send(Said(*crew.heard.get(timeout=LOOK_S)))

        def relay_answers() -> None:
            while self._crew is crew:
                if (data := crew.receive(LOOK_S)) is not None:
                    send(Answer(data))

        threading.Thread(target=relay_words, daemon=True).start()
        if any(place.answers for place in places):
            threading.Thread(target=relay_answers, daemon=True).start()

    def _end_ranks(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end()


def run_node(config: EngineConfig) -> int:
    """`quire serve --headless` on a machine that is not the first."""
    return NodeAgent(config).run()
