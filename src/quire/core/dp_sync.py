"""Data-parallel synchronization: engines that share experts run every step, or are idle, together."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
import zmq

from quire.config.env import Env
from quire.config.expert_parallel import step_sync_address, steps_together
from quire.config.sections import ParallelSection
from quire.data.step_plan import StepPlan
from quire.errors import ConfigError, EngineDead
from quire.logs import FirstWarning, get_logger
from quire.system.cluster_token import VARIABLE, cluster_token, is_same
from quire.system.socket_security import FAILURES, MISMATCHES, Handshakes, events_of, secure

log = get_logger(__name__)

SLICE_MS = 1000
BEAT_MS, SILENCE_MS = 5_000, 30_000
"""Milliseconds between heartbeats, and milliseconds without one until a machine counts as lost. The end of a
process is noticed at once."""
MAX_BYTES = 64 << 10
"""Size limit of a message in bytes; ZMQ closes connections that send a larger message."""
MET, GOODBYE = b"met", b"bye"
_MONITORED = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURES | MISMATCHES
)


class SyncHello(msgspec.Struct, tag="hello", array_like=True):
    """Message of an engine to the hub: its rank, and the token that proves its membership."""

    rank: int
    token: str


class Count(msgspec.Struct, tag="count", array_like=True):
    """Message of an engine to the hub (the first engine): the number of tokens of its next step in a
    round."""

    round: int
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]


class Called(msgspec.Struct, array_like=True):
    """Message of the hub to an engine: a round has begun (`counts` is empty), or the hub has all counts."""

    round: int
    counts: tuple[int, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(SyncHello).decode
_from_engine = msgspec.msgpack.Decoder(SyncHello | Count).decode
_called = msgspec.msgpack.Decoder(Called).decode


@dataclass(frozen=True, slots=True)
class _Engine:
    """The hub's record of an engine that has sent a Hello."""

    identity: bytes
    """ZMQ identity of its connection."""
    fd: int
    """File descriptor by which ZMQ reports that the connection is lost."""


class Lockstep:
    """One engine's part in rounds, in which engines that share experts step together: in each round, all
    engines exchange the number of tokens of their next step.

    An engine with work begins a round, and the first engine, which is the hub, calls the others into it. A
    call into a finished round is ignored. If no engine has a token there is no step, and all engines are idle
    until the next round. If an engine is lost, all engines end: they would wait for it within a step.

    Other hosts may reach the hub's port. The hub accepts only connections that begin with a Hello of an
    expected rank and the shared token; all other messages are ignored.
    """

    def __init__(self, rank: int, size: int, address: str, *, token: str, timeout_s: float = 600.0) -> None:
        self.rank, self.size = rank, size
        self._address, self._token = address, token
        self._timeout_s = timeout_s
        self._round = 0
        self._is_called = False
        self._counts: dict[int, int] = {}
        """Hub: the counts of this round, by rank."""
        self._members: dict[int, _Engine] = {}
        """Hub: the other engines, by rank."""
        self._ranks: dict[bytes, int] = {}
        """Hub: the ranks of connections that have sent a Hello, by identity."""
        self._open_fds: set[int] = set()
        """Hub: file descriptors of all open connections."""
        self._ignore = FirstWarning(log, f"Ignored at {self._address}")
        self._round_counts: tuple[int, ...] | None = None
        """Counts of all engines in the last round; None within a round."""
        self._leaving = threading.Event()
        """Set when this engine or another one has left: no round can begin any more."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER if rank else zmq.ROUTER)
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_MONITORED)
        self._set_up()
        try:
            self._meet()
        except BaseException:
            self.abandon()
            raise
        threading.Thread(target=self._watch, name="quire-lockstep", daemon=True).start()

    # ---- start and end

    def _set_up(self) -> None:
        self.socket.setsockopt(zmq.LINGER, 1000)
        for option in (zmq.RCVHWM, zmq.SNDHWM):
            self.socket.setsockopt(option, 0)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        secure(self.socket, self._token, listens=not self.rank)
        if self.rank:
            self.socket.connect(self._address)
            return
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.socket.bind(self._address)
        except zmq.ZMQError as error:
            self.abandon()
            raise ConfigError(
                f"engines cannot meet at {self._address} ({error}): choose another data_parallel_rpc_port"
            ) from error

    def _meet(self) -> None:
        """Wait until every engine is connected; raise EngineDead after a timeout."""
        deadline = time.monotonic() + self._timeout_s
        if self.rank:
            self._greet(deadline)
            return
        while len(self._members) < self.size - 1:
            self._check_time(deadline)
            self._note_connections()
            if self.socket.poll(SLICE_MS):
                self._admit(self.socket.recv_multipart(copy=False))
        self._note_connections()
        for rank, member in self._members.items():
            if member.fd not in self._open_fds:
                raise EngineDead(f"engine {rank}, which has some of the experts, is gone")
            self._send(rank, MET)

    def _greet(self, deadline: float) -> None:
        """Send a Hello each second until the hub answers; the hub may start later, or restart."""
        handshakes = Handshakes()
        while True:
            self.socket.send(_encode(SyncHello(self.rank, self._token)))
            is_met = bool(self.socket.poll(SLICE_MS)) and self.socket.recv() == MET
            for event, _ in events_of(self._monitor):
                handshakes.note(event)
            if is_met and not handshakes.is_connected:
                raise EngineDead("engine 0, which has some of the experts, is gone")
            if is_met:
                return
            if handshakes.is_refused:
                raise ConfigError(
                    f"engine 0 at {self._address} refuses engine {self.rank}: {VARIABLE} must be the same on"
                    " every machine"
                )
            self._check_time(deadline)

    def _check_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise EngineDead(
                f"engine {self.rank} did not reach the engines with the other experts within"
                f" {self._timeout_s:g} s (--distributed-timeout-seconds)"
            )

    def _note_connections(self) -> None:
        """Update the hub's open connections from ZMQ events, which `_watch` reads later."""
        for event, fd in events_of(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._open_fds.add(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                self._open_fds.discard(fd)

    def _admit(self, frames: "list[zmq.Frame]") -> None:
        """Admit a peer to the hub if its Hello has the token and the rank of an expected engine."""
        identity = frames[0].bytes
        try:
            hello = _hello(frames[-1].bytes)
        except msgspec.MsgspecError as error:
            self._ignore(f"a message that is no Hello of this version: {str(error)!r:.200}")
            return
        self._note_connections()
        known = self._members.get(hello.rank)
        if not is_same(hello.token, self._token):
            self._ignore(f"an engine with another token: {VARIABLE} must be the same on every machine")
        elif not 0 < hello.rank < self.size:
            self._ignore(f"an engine of rank {hello.rank}, which is none of 1 to {self.size - 1}")
        elif known is not None and known.fd in self._open_fds and known.identity != identity:
            self._ignore(f"a second engine with data-parallel rank {hello.rank}")
        elif known is None or known.identity != identity:
            self._members[hello.rank] = _Engine(identity, int(frames[-1].get(zmq.SRCFD)))
            self._ranks = {member.identity: rank for rank, member in self._members.items()}

    def _watch(self) -> None:
        """End this process when an engine is lost. This needs a thread: a step that waits for the engine
        never ends."""
        fds = {member.fd for member in self._members.values()}
        while not self._leaving.is_set():
            if not self._monitor.poll(SLICE_MS // 4):
                continue
            lost = [fd for event, fd in events_of(self._monitor) if event == zmq.EVENT_DISCONNECTED]
            if self.rank == 0:
                lost = [fd for fd in lost if fd in fds]
            if lost and not self._leaving.wait(0.2):
                log.error(
                    "An engine core with other experts disconnected: engine core %d ends as well",
                    self.rank,
                )
                self._end()

    def _end(self) -> None:
        os._exit(1)

    def close(self) -> None:
        """Leave, and notify the other engines that this is a normal end."""
        if self.socket.closed:
            return
        self._leaving.set()
        with contextlib.suppress(EngineDead):
            if self.rank:
                self.socket.send(GOODBYE)
            for rank in self._members:
                self._send(rank, GOODBYE)
        self.abandon()

    def abandon(self) -> None:
        """Close the connections without the message of `close`, so that the other engines take this one for
        lost and end as well."""
        self._leaving.set()
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.socket.close()

    # ---- rounds

    @property
    def is_called(self) -> bool:
        """Whether other engines have begun a round that this engine has not joined yet; does not wait."""
        while self.socket.poll(0):
            self._handle(self.socket.recv_multipart())
        return self._is_called

    def join_round(self, plan: StepPlan | None) -> StepPlan | None:
        """Exchange token counts with all engines, which waits for each of them, and return the plan with the
        counts. If only other engines have work, return a plan without rows; if no engine has work, return
        None."""
        counts = self._exchange(0 if plan is None else plan.total_tokens)
        if not any(counts):
            assert plan is None
            return None
        if plan is None:
            plan = StepPlan.idle(-1)
        plan.counts = counts
        return plan

    def _exchange(self, num_tokens: int) -> tuple[int, ...]:
        self._round_counts = None
        if self.rank:
            self.socket.send(_encode(Count(self._round, num_tokens)))
        else:
            self._add_count(0, num_tokens)
        deadline = time.monotonic() + self._timeout_s
        while self._round_counts is None:
            if self._leaving.is_set():
                raise EngineDead("an engine with some of the experts has ended")
            self._check_time(deadline)
            if self.socket.poll(SLICE_MS):
                self._handle(self.socket.recv_multipart())
        return self._round_counts

    def _handle(self, parts: list[bytes]) -> None:
        identity, data = parts[0], parts[-1]
        if self.rank:
            self._handle_hub(data)
        elif (rank := self._ranks.get(identity)) is None:
            self._ignore("a message of a peer that is none of the engines")
        elif data == GOODBYE:
            self._leaving.set()
        else:
            self._handle_engine(rank, data)

    def _handle_engine(self, rank: int, data: bytes) -> None:
        try:
            message = _from_engine(data)
        except msgspec.MsgspecError as error:
            self._ignore(f"a message of engine {rank} that is none of this version: {str(error)!r:.200}")
            return
        if isinstance(message, SyncHello):  # repeated by the engine before the hub answered the first Hello
            return
        if message.round != self._round:
            raise EngineDead(
                f"engine {rank} is in round {message.round} of the steps that engines run together, and "
                f"engine 0 in round {self._round}"
            )
        self._add_count(rank, message.num_tokens)

    def _handle_hub(self, data: bytes) -> None:
        if data == GOODBYE:
            self._leaving.set()
            return
        try:
            called = _called(data)
        except msgspec.MsgspecError as error:
            self._ignore(f"a message of engine 0 that is none of this version: {str(error)!r:.200}")
            return
        if called.round == self._round and called.counts:
            self._end_round(called.counts)
        elif called.round == self._round:
            self._is_called = True

    def _add_count(self, rank: int, num_tokens: int) -> None:
        """Record the count of an engine in the hub."""
        if not self._counts:
            for other in range(1, self.size):
                if other != rank:
                    self._send(other, _encode(Called(self._round)))
        self._counts[rank] = num_tokens
        self._is_called = 0 not in self._counts
        if len(self._counts) < self.size:
            return
        counts = tuple(self._counts[rank] for rank in range(self.size))
        for other in range(1, self.size):
            self._send(other, _encode(Called(self._round, counts)))
        self._counts = {}
        self._end_round(counts)

    def _end_round(self, counts: tuple[int, ...]) -> None:
        self._round_counts, self._is_called = counts, False
        self._round += 1

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self.socket.send_multipart([self._members[rank].identity, data])
        except zmq.ZMQError as error:
            raise EngineDead(f"engine {rank}, which has some of the experts, is gone: {error}") from error


def open_lockstep(parallel: ParallelSection, token: str | None = None) -> Lockstep | None:
    """Connect to the engines that share experts with this one and wait for them; return None for an engine
    that steps alone.

    Without a `token`, the token of this machine's environment or user is used.
    """
    if not steps_together(parallel):
        return None
    if token is None:
        token = cluster_token(Env.read(os.environ), parallel.data_parallel_address)
    return Lockstep(
        parallel.data_parallel_rank or 0,
        parallel.data_parallel_size,
        step_sync_address(parallel),
        token=token,
        timeout_s=parallel.distributed_timeout_seconds,
    )
