"""CoreLink: the connection of an API process to one engine core, and the state of that core."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.data.wire import (
    ControlCall,
    FromCore,
    Heartbeat,
    Hello,
    Missing,
    Ready,
    Reply,
    StepDone,
    ToCore,
    decode_from_core,
    encode,
)
from quire.errors import EngineDead, EngineError, RequestError
from quire.frontend.control import CALL_TIMEOUT_S
from quire.frontend.engine_link import EngineLink, Owner
from quire.frontend.outputs import OutputProcessor
from quire.logs import get_logger
from quire.system.socket_security import secure

log = get_logger(__name__)

HELLO_INTERVAL_S = 0.1
RECONNECT_MS = 10
"""Milliseconds between two attempts to connect to a core on this machine, which may still be starting."""
MAX_BEHIND = 1000
"""Maximum number of a core's messages that are buffered in this process; further messages are buffered by the
core, which handles slow clients."""
READ_S = 0.004
"""Maximum seconds for which messages of a core are read before the outputs in them are delivered."""
YIELD_ROUNDS = 4
"""Event loop iterations between two reads: new requests progress even if the core outpaces this process."""
HEARTBEAT_MS = 1000
"""Milliseconds between two heartbeats on a connection to another machine."""
SILENCE_MS = 10_000
"""Milliseconds without a heartbeat after which a connection to another machine is closed."""


class CoreLink(EngineLink):
    """The connection to the engine core of one data-parallel rank, with health checks."""

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
        """Create a connection, which `start` opens. `place` is its index among the connections of `owner`,
        which handles its events. `address` may be a file that will contain the address once it is known;
        `token` is the secret that the core expects."""
        super().__init__(place, rank, name=name, outputs=outputs, owner=owner, clock=clock)
        self._address = address
        self._token = token
        self._connected_to = ""
        self._stalled_s = 0.0
        """Seconds for which the core had work and finished no step, as last reported."""
        self._num_resets = 0
        self._is_scheduled = False
        """Whether the next read is already scheduled."""
        self._is_look_due = False
        """Whether `send` has scheduled a read: sending may consume the edge-triggered event of an arrived
        message."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- life

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._disconnect()
        self.core, self.was_up = None, False
        self.down_since, self._down_reason = self._clock(), f"{self.name} is not loaded"

    def problem(self, health_timeout_s: float) -> str | None:
        """Return why the core is unavailable: it is down, or hangs in a step; None if it is available."""
        if self.core is None:
            return self._down_reason
        standstill = self._stalled_s + self.silent_s
        if standstill <= health_timeout_s:
            return None
        return f"{self.name} has made no progress for {standstill:.1f} s; the limit is {health_timeout_s:g} s"

    async def _watch(self) -> None:
        """Repeat without end: send Hello to a core that has not answered yet, and detect the death of a core
        that has."""
        while True:
            try:
                self._check()
            except Exception:  # without this task the connection would never recover
                log.exception("Checking the connection to %s failed; retrying", self.name)
            await asyncio.sleep(HELLO_INTERVAL_S)

    def _check(self) -> None:
        if self.core is None:
            self._connect()
            if self._socket is not None:
                self.send(Hello(self._token))
        elif self._is_disconnected(self.core):
            self._handle_death()

    def _is_disconnected(self, core: Ready) -> bool:
        if self._monitor is None:
            return not _is_alive(core.pid)
        has_ended = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            has_ended = True
        return has_ended

    def _handle_death(self) -> None:
        assert self.core is not None
        self._down_reason = f"{self.name} (process {self.core.pid}) died and is being restarted"
        self.core = None
        self.down_since = self._clock()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(self._down_reason))
        # Messages that are still queued for the dead core must not reach the next one.
        self._disconnect()
        self._owner.on_death(self)

    def _connect(self) -> None:
        """Connect to the address of the core, if it is known and differs from the address of the last
        attempt."""
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
        else:
            self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        asyncio.get_running_loop().add_reader(self._socket.FD, self._on_readable)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            log.error(
                "Cannot connect to %s at %.80r: %s. Requests to it wait until it is restarted elsewhere",
                self.name,
                address,
                error,
            )
            self._disconnect()
            self._connected_to = address  # no retry until the address changes

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
        # Sending may consume the edge-triggered event of an arrived message.
        if not self._is_look_due:
            self._is_look_due = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._is_look_due = False
        self._on_readable()

    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        return [await self.call(method, args, timeout_s)]

    async def call(
        self, method: str, args: dict[str, Any] | None = None, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> Any:
        """Call a method of the core and wait for the reply; `timeout_s` None: without a limit."""
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(ControlCall(number, method, args or {}))
            return await asyncio.wait_for(self._calls[number], timeout_s)
        finally:
            del self._calls[number]

    # ---- in

    def _on_readable(self) -> None:
        """Handle the socket's event, which is triggered once for any number of messages."""
        if not self._is_scheduled:
            self._read_and_deliver()

    def _read_and_deliver(self) -> None:
        """Read messages for at most READ_S seconds, then deliver their outputs, so that a stream gets one
        output for several steps. If messages remain, other tasks run before the next read."""
        self._is_scheduled = False  # so that the next message is read even after an error
        is_all = self._receive()
        self._owner.on_outputs(self)
        self._is_scheduled = not is_all
        if self._is_scheduled:
            self._schedule_read(YIELD_ROUNDS)

    def _schedule_read(self, rounds: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._schedule_read, rounds - 1) if rounds else loop.call_soon(self._read_and_deliver)

    def _receive(self) -> bool:
        """Handle messages of the core for at most READ_S seconds; return whether all that had arrived were
        read."""
        deadline = self._clock() + READ_S
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                message = decode_from_core(data)
            except msgspec.MsgspecError as error:
                log.error(
                    "Ignored an invalid message from %s (another version of Quire?): %.200r",
                    self.name,
                    str(error),
                )
                continue
            self.handle(message)
            if self._heard_at > deadline:
                return False
        return True

    def handle(self, message: FromCore) -> None:
        self._heard_at = self._clock()
        match message:
            case StepDone(output):
                self._stalled_s = 0.0
                self.stats = output.stats
                self.outputs.add_step(output)
                self._owner.on_stats(self, b"")
            case Heartbeat():
                self._stalled_s = message.stalled_s
                if message.num_resets != self._num_resets:
                    self._num_resets = message.num_resets
                    self._owner.on_reset()
                self.stats = message.stats
                self._owner.on_stats(self, message.page)
            case Reply():
                self._handle_reply(message)
            case Missing():
                self._owner.on_missing(message.request_id)
            case Ready() if self.core is None:
                self.core = message
                self.was_up = True
                self.start_s = message.start_s
                self._stalled_s = 0.0
                self._owner.on_ready(self)

    def _handle_reply(self, reply: Reply) -> None:
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
    """Return whether a process is alive; a zombie counts as dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
        pass
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
