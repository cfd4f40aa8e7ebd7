"""CoreLink: an API process's connection to one core, and what it knows of it."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.data.stats import StepStats
from quire.data.wire import (
    Beat,
    ControlCall,
    FromCore,
    Hello,
    Missing,
    Ready,
    Reply,
    Stepped,
    ToCore,
    decode_from_core,
    encode,
)
from quire.errors import EngineDead, EngineError, RequestError
from quire.frontend.outputs import OutputProcessor
from quire.logs import get_logger
from quire.system.cluster_token import secure

log = get_logger(__name__)

HELLO_INTERVAL_S = 0.1
CALL_TIMEOUT_S = 30.0
MAX_BEHIND = 1000
"""Messages that wait on this side; more wait in the core, which knows what to do about it."""
TURN_S = 0.004
"""How long the core's messages are read before what they brought is handed out."""
REST = 4
"""Rounds of the event loop that belong to everybody else between two turns: so many steps of his own a new
request makes while the core is faster than this process."""
HEARTBEAT_MS = 1000
"""Between two signs of life of a connection to another machine, which may be gone without a word."""
SILENCE_MS = 10_000
"""Without one for so long, it is."""


class Owner(Protocol):
    """Who has the links: told of what they bring."""

    def on_ready(self, link: "CoreLink") -> None: ...
    def on_news(self, link: "CoreLink", page: bytes) -> None:
        """The core has said how much it has to do; `page` are its numbers, if it is on another machine."""

    def on_reset(self) -> None:
        """Somebody wants that processed media are forgotten."""

    def on_missing(self, request_id: str) -> None:
        """A core lacks the arrays of a request, the first sequence of which this is."""

    def on_turn(self, link: "CoreLink") -> None:
        """Some of its steps have been noted in `link.outputs`."""

    def on_death(self, link: "CoreLink") -> None: ...


class CoreLink:
    """The connection to the core of one data-parallel rank: messages both ways, and whether it gets on."""

    def __init__(
        self,
        place: int,
        rank: int,
        address: str | Path,
        *,
        name: str,
        token: str,
        outputs: OutputProcessor,
        owner: Owner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`place` is its number among the links of its owner. `address` may be a file that will hold it, once
        the core's machine has told where it is; `token` is the secret that the core expects."""
        self.place = place
        self.rank = rank
        self.name = name
        self.outputs = outputs
        self._clock = clock
        self.core: Ready | None = None
        self.stats = StepStats()
        """The core's gauges, when it last told of them."""
        self.was_up = False
        self.start_s = 0.0
        """Seconds that the last start of the core took."""
        self.down_since = self._clock()
        self._address = address
        self._token = token
        self._connected_to = ""
        self._owner = owner
        self._why_down = f"{name} is starting"
        self._heard_at = self._clock()
        self._stalled_s = 0.0
        """How long the core had work and finished no step, when it was last heard of."""
        self._num_resets = 0
        self._resting = False
        """Whether a turn is to come by itself."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- life

    def start(self) -> None:
        """Connect, from inside the running loop."""
        self._task = asyncio.create_task(self._tend())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._disconnect()

    @property
    def silent_s(self) -> float:
        """Since the core was last heard of."""
        return self._clock() - self._heard_at

    def problem(self, health_timeout_s: float) -> str | None:
        """Why the core cannot be asked: it is down, or has work and finished no step for too long."""
        if self.core is None:
            return self._why_down
        standstill = self._stalled_s + self.silent_s
        if standstill <= health_timeout_s:
            return None
        return f"{self.name} has made no progress for {standstill:.1f} s; the limit is {health_timeout_s:g} s"

    async def _tend(self) -> None:
        """Say Hello until the core answers; notice within a moment that it is gone."""
        while True:
            try:
                self._look()
            except Exception:  # a link that nothing looks after would stay as it is for ever
                log.exception("Looking after the connection to %s failed; it is tried again", self.name)
            await asyncio.sleep(HELLO_INTERVAL_S)

    def _look(self) -> None:
        if self.core is None:
            self._connect()
            if self._socket is not None:
                self.send(Hello(self._token))
        elif self._is_gone(self.core):
            self._died()

    def _is_gone(self, core: Ready) -> bool:
        if self._monitor is None:
            return not _is_alive(core.pid)
        gone = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            gone = True
        return gone

    def _died(self) -> None:
        assert self.core is not None
        self._why_down = f"{self.name} (process {self.core.pid}) died and is being restarted"
        self.core = None
        self.down_since = self._clock()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(self._why_down))
        # What is still queued for the dead core must not reach the next one.
        self._disconnect()
        self._owner.on_death(self)

    def _connect(self) -> None:
        """To where the core is, if that is known, and unless that is done."""
        address = _read(self._address) if isinstance(self._address, Path) else self._address
        if address == self._connected_to or not address:
            return
        self._disconnect()
        self._connected_to = address
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, MAX_BEHIND)):
            self._socket.setsockopt(option, value)
        if address.startswith("tcp:"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            secure(self._socket, self._token, listens=False)
        asyncio.get_running_loop().add_reader(self._socket.FD, self._arrived)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            log.error("%s cannot be reached at %.80r: %s", self.name, address, error)
            self._disconnect()
            self._connected_to = address  # until its machine names another one

    def _disconnect(self) -> None:
        self._connected_to = ""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.FD)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor = None
        self._socket.close()
        self._socket = None

    # ---- out

    def send(self, message: ToCore) -> None:
        assert self._socket is not None
        self._socket.send(encode(message), zmq.NOBLOCK)
        # Sending may swallow the edge that says that something arrived.
        asyncio.get_running_loop().call_soon(self._arrived)

    async def call(
        self, method: str, args: dict[str, Any] | None = None, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> Any:
        """None: however long it takes."""
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(ControlCall(number, method, args or {}))
            return await asyncio.wait_for(self._calls[number], timeout_s)
        finally:
            del self._calls[number]

    # ---- in

    def _arrived(self) -> None:
        """The socket's descriptor tells only once, however much is there."""
        if not self._resting:
            self._turn()

    def _turn(self) -> None:
        """Read for a moment, then hand out what came: a stream gets one piece however many steps that were.
        With more to read, others get theirs first."""
        self._resting = False  # whatever fails below, the next message is read
        is_all = self._receive()
        self._owner.on_turn(self)
        self._resting = not is_all
        if self._resting:
            self._rest(REST)

    def _rest(self, rounds: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._rest, rounds - 1) if rounds else loop.call_soon(self._turn)

    def _receive(self) -> bool:
        """Messages of the core, for a bounded time; whether that was all."""
        deadline = self._clock() + TURN_S
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                message = decode_from_core(data)
            except msgspec.MsgspecError as error:
                log.error(
                    "Ignored a message of %s that is none of this version: %.200r", self.name, str(error)
                )
                continue
            self.handle(message)
            if self._heard_at > deadline:
                return False
        return True

    def handle(self, message: FromCore) -> None:
        self._heard_at = self._clock()
        match message:
            case Stepped(output):
                self._stalled_s = 0.0
                self.stats = output.stats
                self.outputs.take(output)
                self._owner.on_news(self, b"")
            case Beat():
                self._stalled_s = message.stalled_s
                if message.num_resets != self._num_resets:
                    self._num_resets = message.num_resets
                    self._owner.on_reset()
                self.stats = message.stats
                self._owner.on_news(self, message.page)
            case Reply():
                self._hear_reply(message)
            case Missing():
                self._owner.on_missing(message.request_id)
            case Ready() if self.core is None:
                self.core = message
                self.was_up = True
                self.start_s = message.start_s
                self._stalled_s = 0.0
                self._owner.on_ready(self)

    def _hear_reply(self, reply: Reply) -> None:
        if (call := self._calls.get(reply.number)) is None or call.done():
            return
        if reply.is_request:
            call.set_exception(RequestError(reply.error, reply.param))
        elif reply.error:
            call.set_exception(EngineError(reply.error))
        else:
            call.set_result(reply.value)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def _is_alive(pid: int) -> bool:
    """A process that has ended but is not yet reaped counts as dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # the latter if it ends between the opening and the reading
        pass
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
