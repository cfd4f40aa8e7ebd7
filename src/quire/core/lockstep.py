"""Lockstep: engines that share experts take every step together, and rest together."""

import contextlib
import os
import threading
import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config.experts import rounds_of, steps_together
from quire.config.sections import ParallelSection
from quire.data.plan import StepPlan
from quire.errors import ConfigError, EngineDead
from quire.logs import get_logger

log = get_logger(__name__)

SLICE_MS = 1000
BEAT_MS, SILENCE_MS = 5_000, 30_000
"""A machine that says nothing for so long counts as gone; the death of a process is noticed at once."""
GOODBYE = b"bye"


class Count(msgspec.Struct, array_like=True):
    """From an engine: what it has to do in a round."""

    round: int
    num_tokens: int


class Called(msgspec.Struct, array_like=True):
    """To an engine: a round has begun (no counts), or is agreed on."""

    round: int
    counts: tuple[int, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_count, _called = msgspec.msgpack.Decoder(Count).decode, msgspec.msgpack.Decoder(Called).decode


class Lockstep:
    """One engine's part in rounds: in each, all say how many tokens their next step has, and hear of all.

    Who has work begins a round, and the first engine, which is the hub, calls the others into it. A call into
    a round that is over means nothing. Where nobody has a token there is no step, and all rest until someone
    begins the next round. An engine that goes away ends all: they would wait for it in the middle of a step.
    """

    def __init__(self, rank: int, size: int, address: str, *, timeout_s: float = 600.0) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._round = 0
        self._is_called = False
        self._counts: dict[int, int] = {}
        """Hub: what was said in this round, by rank."""
        self._agreed: tuple[int, ...] | None = None
        self._leaving = threading.Event()
        """Set when one has ended as it should: there are no more rounds."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER if rank else zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        for option in (zmq.RCVHWM, zmq.SNDHWM):
            self.socket.setsockopt(option, 0)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if rank:
            self.socket.setsockopt(zmq.IDENTITY, rank.to_bytes(4, "big"))
            self.socket.connect(address)
        else:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            try:
                self.socket.bind(address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"engines cannot meet at {address} ({error}): choose another data_parallel_rpc_port"
                ) from error
        self._meet()
        self._watch()

    # ---- start and end

    def _meet(self) -> None:
        """Everybody is there before the first round."""
        deadline = time.monotonic() + self._timeout_s
        if self.rank:
            self.socket.send(b"here")
            self._receive(deadline)
            return
        met = set[bytes]()
        while len(met) < self.size - 1:
            met.add(self._receive(deadline)[0])
        for other in met:
            self.socket.send_multipart([other, b"met"])

    def _receive(self, deadline: float) -> list[bytes]:
        while not self.socket.poll(SLICE_MS):
            if time.monotonic() > deadline:
                raise EngineDead(f"engine {self.rank} waits in vain for those that have the other experts")
        return self.socket.recv_multipart()

    def _watch(self) -> None:
        """From a thread: a step that waits for one that is gone would never end."""
        monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

        def watch() -> None:
            while not self._leaving.is_set():
                if monitor.poll(SLICE_MS // 4):
                    recv_monitor_message(monitor)
                    if not self._leaving.wait(0.2):
                        log.error(
                            "An engine with some of the experts is gone: engine %d ends, too", self.rank
                        )
                        self._end()

        threading.Thread(target=watch, name="quire-lockstep", daemon=True).start()

    def _end(self) -> None:
        os._exit(1)

    def close(self) -> None:
        """Leave: the others are told that it is no accident."""
        if self.socket.closed:
            return
        self._leaving.set()
        with contextlib.suppress(EngineDead):
            if self.rank:
                self.socket.send(GOODBYE)
            for rank in range(1, self.size) if not self.rank else ():
                self._tell(rank, GOODBYE)
        self.socket.disable_monitor()
        self.socket.close()

    # ---- rounds

    @property
    def is_called(self) -> bool:
        """Whether others have begun a round."""
        while self.socket.poll(0):
            self._hear(self.socket.recv_multipart())
        return self._is_called

    def agreed(self, plan: StepPlan | None) -> StepPlan | None:
        """The plan with everybody's counts; one without rows where only others have work; None where nobody
        has."""
        counts = self._exchange(0 if plan is None else plan.total_tokens)
        if not any(counts):
            assert plan is None
            return None
        if plan is None:
            plan = StepPlan.idle(-1)
        plan.counts = counts
        return plan

    def _exchange(self, num_tokens: int) -> tuple[int, ...]:
        self._agreed = None
        if self.rank:
            self.socket.send(_encode(Count(self._round, num_tokens)))
        else:
            self._say(0, num_tokens)
        deadline = time.monotonic() + self._timeout_s
        while self._agreed is None:
            if self._leaving.is_set():
                raise EngineDead("an engine with some of the experts has ended")
            self._hear(self._receive(deadline))
        return self._agreed

    def _hear(self, message: list[bytes]) -> None:
        if message[-1] == GOODBYE:
            self._leaving.set()
            return
        if self.rank:
            called = _called(message[-1])
            if called.round == self._round and called.counts:
                self._next(called.counts)
            elif called.round == self._round:
                self._is_called = True
            return
        count = _count(message[1])
        assert count.round == self._round, "an engine is in another round"
        self._say(int.from_bytes(message[0], "big"), count.num_tokens)

    def _say(self, rank: int, num_tokens: int) -> None:
        """Hub: one more has said its count."""
        if not self._counts:
            for other in range(1, self.size):
                if other != rank:
                    self._tell(other, _encode(Called(self._round)))
        self._counts[rank] = num_tokens
        self._is_called = 0 not in self._counts
        if len(self._counts) < self.size:
            return
        counts = tuple(self._counts[each] for each in range(self.size))
        for other in range(1, self.size):
            self._tell(other, _encode(Called(self._round, counts)))
        self._counts = {}
        self._next(counts)

    def _next(self, counts: tuple[int, ...]) -> None:
        self._agreed, self._is_called = counts, False
        self._round += 1

    def _tell(self, rank: int, data: bytes) -> None:
        try:
            self.socket.send_multipart([rank.to_bytes(4, "big"), data])
        except zmq.ZMQError as error:
            raise EngineDead(f"engine {rank}, which has some of the experts, is gone: {error}") from error


def open_lockstep(parallel: ParallelSection) -> Lockstep | None:
    """None: this engine steps by itself."""
    if not steps_together(parallel):
        return None
    rank = parallel.data_parallel_rank or 0
    timeout_s = parallel.distributed_timeout_seconds
    return Lockstep(rank, parallel.data_parallel_size, rounds_of(parallel), timeout_s=timeout_s)
