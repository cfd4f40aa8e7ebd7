"""RemoteEngines: reads KV cache entries that other engines offer.

Each prefix is read over its own connection, so that no state remains of an engine that has ended."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.kv_identity import layout_digest, transfer_layout
from quire.config.kv_transfer import TransferSettings
from quire.data.kv_transfer import MAX_KEYS, EntriesRead, ReadEntries, RemotePrefix
from quire.logs import get_logger
from quire.system.cluster_token import VARIABLE, cluster_token
from quire.system.kv_channel import TransferMemory, token_host, zmq_address
from quire.system.socket_security import FAILURES, MISMATCHES, events_of, secure
from quire.worker.cuda.ipc import CudaIpc, IpcBuffer

log = get_logger(__name__)

AT_ONCE_BYTES = 32 << 20
"""Maximum bytes of the entries that one message requests, unless a single entry is larger."""
_MAX_BYTES = 1 << 30
"""Size limit of an answer; ZMQ closes connections that send a larger one."""
_UNREACHABLE_S = 5.0
"""Seconds after a failed connection in which the engine is not contacted again."""
_END_S = 10.0
"""Seconds after the end of an engine in which its last copies to buffers are surely done."""
_LINGER_MS = 1000
_OTHER_TOKEN = f"it refused the connection: {VARIABLE} must be the same for both engines"
_MONITORED = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | FAILURES | MISMATCHES
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EntriesRead).decode

Bytes = NDArray[np.uint8]


class RemoteEngines:
    """Connections to the engines that KV cache prefixes are loaded from; may be used by several threads."""

    def __init__(
        self,
        layout: dict[str, str],
        token: str,
        *,
        timeout_s: float,
        rank: int = 0,
        ipc: CudaIpc | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the `layout`, which describes the model and its cache, and must be the same in all engines.
        `rank` is the rank of this worker in its engine. With `ipc`, entries arrive on its GPU if possible."""
        self.layout, self.token = layout, token
        self.digest = layout_digest(layout)
        self.timeout_s = timeout_s
        self.rank = rank
        self.ipc = ipc
        self.clock = clock
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._unreachable: dict[tuple[str, int], tuple[float, str]] = {}
        """Engines that could not be reached, by host and port, with the time of the next attempt and the
        problem."""
        self.device_reach: dict[tuple[str, int], bool] = {}
        """Whether engines can write to the memory of this GPU, by host and port, as far as it is known."""

    def open(self, prefix: RemotePrefix) -> "RemoteRead":
        """Return a reader of a prefix. If its engine could not be reached within the last `_UNREACHABLE_S`
        seconds, the reader reads nothing."""
        until, problem = self._unreachable.get((prefix.host, prefix.port), (0.0, ""))
        return RemoteRead(self, prefix, problem if self.clock() < until else "")

    def note(self, prefix: RemotePrefix, problem: str) -> None:
        address = prefix.host, prefix.port
        self._unreachable[address] = self.clock() + _UNREACHABLE_S, problem
        self.device_reach.pop(address, None)  # another engine may take its place

    def reaches_device(self, prefix: RemotePrefix) -> bool:
        """Whether the engine of a prefix may be able to write to the memory of this GPU."""
        return self.device_reach.get((prefix.host, prefix.port), True)

    def note_device(self, prefix: RemotePrefix, *, is_reached: bool) -> None:
        """Note whether the engine of a prefix has written to the memory of this GPU."""
        address = prefix.host, prefix.port
        if address not in self.device_reach:
            place = "this GPU by CUDA IPC" if is_reached else "host memory, since CUDA IPC is not possible"
            log.info("Prefixes of the engine at %s:%d arrive in %s", prefix.host, prefix.port, place)
        self.device_reach[address] = is_reached

    def close(self) -> None:
        self.context.destroy(linger=0)


class RemoteRead:
    """Reads the entries of one prefix from the engine that keeps it; at the end, that engine releases the
    prefix."""

    def __init__(self, engines: RemoteEngines, prefix: RemotePrefix, problem: str) -> None:
        self.problem = problem
        """Reason why no more entries are read; empty if there is none."""
        self._is_lost = bool(problem)
        """Whether the engine cannot be reached."""
        self._engines, self._prefix = engines, prefix
        self._until = engines.clock() + engines.timeout_s
        self._stack = contextlib.ExitStack()
        self._memory: TransferMemory | None = None
        self._shares_memory = hasattr(os, "memfd_create")
        self.buffer: IpcBuffer | None = None
        """Memory of the device that each read overwrites; None: entries arrive in host memory."""
        self._is_written = False
        """Whether the other engine may still write to the buffer."""
        self._is_gone = False
        """Whether the other engine has ended, or was never reached."""

    @staticmethod
    def num_at_once(entry_bytes: int) -> int:
        """Return the largest number of entries of one read."""
        return min(max(AT_ONCE_BYTES // max(entry_bytes, 1), 1), MAX_KEYS)

    def read(self, keys: Sequence[bytes], entry_bytes: int) -> list[Bytes | Tensor | None]:
        """Return the contents of entries of the same kind; None for those that cannot be read. Tensors are
        valid until the next read."""
        contents: list[Bytes | Tensor | None] = [None] * len(keys)
        if self.problem:
            return contents
        message = self._message(keys=list(keys))
        memory = self._memory_for(len(keys) * entry_bytes)
        message.target = None if memory is None else memory.target
        self._is_written = memory is self.buffer
        if (answer := self._ask(message)) is None:
            return contents
        head, data = answer
        if head.in_memory:
            data = b"" if memory is None else memory.data
        num_bytes = len(head.places) * entry_bytes
        is_whole = len(data) >= num_bytes if head.in_memory else len(data) == num_bytes
        if not is_whole or not _is_ordered(head.places, len(keys)):
            self.problem = "its answer is not one of this version"
            return contents
        if len(head.places) < len(keys):
            lost = len(keys) - len(head.places)
            self.problem = f"{lost} of {len(keys)} entries are not kept there any more"
        if head.places:
            self._note_memory(memory, head.in_memory)
        is_here = isinstance(data, Tensor)
        rows = data[:num_bytes] if is_here else np.frombuffer(data, np.uint8, num_bytes).copy()
        for place, entry in zip(head.places, rows.reshape(-1, entry_bytes), strict=True):
            contents[place] = entry
        return contents

    def close(self) -> None:
        """Let the engine release the prefix, unless it could not be reached, and close the connection."""
        is_written = self._is_written
        try:
            if not self._is_lost:
                problem, self.problem = self.problem, ""
                self._ask(self._message(ends=True))
                self.problem = problem or self.problem
        finally:
            self._stack.close()
            if not is_written or self._is_gone:
                self._give_back(_END_S if is_written else 0.0)

    def _message(self, *, keys: list[bytes] | None = None, ends: bool = False) -> ReadEntries:
        engines = self._engines
        prefix = self._prefix.request_id
        return ReadEntries(engines.token, engines.digest, prefix, keys or [], ends=ends, rank=engines.rank)

    def _memory_for(self, num_bytes: int) -> IpcBuffer | TransferMemory | None:
        """Return memory to which the other engine may write this many bytes, if it is on this machine: of the
        device, unless that engine cannot reach it."""
        ipc = self._engines.ipc
        if self.buffer is None and ipc is not None and self._engines.reaches_device(self._prefix):
            self.buffer = ipc.take()
        if self.buffer is not None and num_bytes <= len(self.buffer.data):
            return self.buffer
        if not self._shares_memory or not num_bytes:
            return None
        try:
            if self._memory is None or len(self._memory.data) < num_bytes:
                self._memory = self._stack.enter_context(TransferMemory(num_bytes))
        except OSError:
            self._shares_memory = False
            return None
        return self._memory

    def _note_memory(self, memory: IpcBuffer | TransferMemory | None, is_used: bool) -> None:
        """Note whether the other engine has written to this memory; if not, it is not offered again."""
        if memory is not None and memory is self.buffer:
            self._engines.note_device(self._prefix, is_reached=is_used)
            if not is_used:
                self._give_back()
        else:
            self._shares_memory = self._shares_memory and is_used

    def _give_back(self, delay_s: float = 0.0) -> None:
        if self.buffer is not None and self._engines.ipc is not None:
            self._engines.ipc.give_back(self.buffer, delay_s)
            self.buffer = None

    def _ask(self, message: ReadEntries) -> tuple[EntriesRead, Any] | None:
        """Send a message; return the answer and the bytes after it. On an error, set `problem` and return
        None."""
        try:
            head, *frames = self._exchange(_encode(message))
            answer = _decode(head)
        except (OSError, zmq.ZMQError) as error:
            self.problem, self._is_lost = str(error), True
            self._is_gone = isinstance(error, ConnectionError)
            self._engines.note(self._prefix, self.problem)
            return None
        except msgspec.MsgspecError:
            self.problem = "its answer is not one of this version"
            return None
        if answer.layout:
            self.problem = _differences(self._engines.layout, answer.layout)
            self._engines.note(self._prefix, self.problem)
        self._is_written = self._is_written and bool(answer.problem)
        self.problem = self.problem or answer.problem
        return None if self.problem else (answer, frames[0] if frames else b"")

    def _exchange(self, message: bytes) -> list[bytes]:
        """Send a message and return the frames of its answer. Raise ConnectionError if the connection is
        lost, and TimeoutError if there is no answer in time."""
        sock, monitor, poller = self._connection
        try:
            sock.send(message, zmq.NOBLOCK)
        except zmq.Again:  # the handshake has failed, and ZMQ does not try again
            raise ConnectionError(_OTHER_TOKEN) from None
        while (left := self._until - self._engines.clock()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if sock in ready:
                return sock.recv_multipart()
            events = [event for event, _ in events_of(monitor)]
            if any(event & (FAILURES | MISMATCHES) for event in events):
                raise ConnectionError(_OTHER_TOKEN)
            if events:
                raise ConnectionError("it cannot be reached")
        raise TimeoutError(f"it did not answer within {self._engines.timeout_s:g} s")

    @cached_property
    def _connection(self) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes], zmq.Poller]":
        """Return the connected socket, the socket that reports its failures, and a poller of both."""
        address, is_v6 = zmq_address(self._prefix.host, self._prefix.port)
        sock: zmq.Socket[bytes] = self._engines.context.socket(zmq.DEALER)
        self._stack.callback(sock.close, _LINGER_MS)
        monitor: zmq.Socket[bytes] = sock.get_monitor_socket(_MONITORED)
        self._stack.callback(monitor.close)
        self._stack.callback(sock.disable_monitor)
        sock.setsockopt(zmq.IPV6, is_v6)
        sock.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        secure(sock, self._engines.token, listens=False)
        sock.connect(address)
        poller = zmq.Poller()
        poller.register(sock, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        return sock, monitor, poller


def _is_ordered(places: list[int], count: int) -> bool:
    """Whether `places` are indices of `count` keys in ascending order."""
    return places == sorted({*places}) and {*places} <= {*range(count)}


def _differences(here: dict[str, str], there: dict[str, str]) -> str:
    """Describe how the layouts of two engines differ."""
    names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    listed = "; ".join(f"{name} is {here.get(name)} here and {there.get(name)} there" for name in names)
    return f"both engines must have the same model and cache layout, and {listed:.2000}"


def open_remote_engines(config: EngineConfig, rank: int, ipc: CudaIpc | None) -> RemoteEngines | None:
    """Return the connections through which a rank loads prefixes from other engines, by CUDA IPC if it is
    given and possible; None if the engine loads no prefixes."""
    settings = TransferSettings.of(config.cache.kv_transfer_config)
    if settings is None or not settings.consumes:
        return None
    env = Env.read(os.environ)
    token = cluster_token(env, token_host(settings, env.kv.nixl_side_channel_host))
    return RemoteEngines(transfer_layout(config), token, timeout_s=settings.load_timeout, rank=rank, ipc=ipc)
