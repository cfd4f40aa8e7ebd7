"""Acceptance of connections, and their distribution to several API processes.

If several processes accept from one socket, the first to wake up takes all waiting connections. Therefore
only the supervisor accepts. It passes each connection to the process with the fewest open connections.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.logs import FirstWarning, get_logger

log = get_logger(__name__)

MAX_ACCEPTS = 256
"""Maximum connections that are accepted before the event loop or the supervisor handles other events."""
PAUSE_S = 0.05


@dataclass(frozen=True)
class ConnectionHandle:
    """Handle with which an API process receives connections from the supervisor. The process counts its
    closed connections in `closed_file`, at position `index`."""

    channel: socket.socket
    """Socket that carries one message per connection, with its file descriptor."""
    closed_file: Path
    index: int


class ConnectionDealer:
    """Accepts connections in the supervisor and passes them to the API processes. A process, identified by
    its index, receives connections from the call of `admit` until the call of `drop`."""

    def __init__(self, listener: socket.socket, closed_file: Path, count: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._file = closed_file
        np.zeros(count, np.int64).tofile(closed_file)
        self._closed = np.memmap(closed_file, np.int64, "r+")
        """Number of connections that each process has closed; each process writes its own count."""
        self._num_passed = [0] * count
        self._channels: list[tuple[socket.socket, socket.socket] | None] = [None] * count
        """Socket pairs by process: the supervisor's end and the process's end; None without a process."""
        self._serving: set[int] = set()
        self._pending: socket.socket | None = None
        """Accepted connection that no process could take yet."""

    @property
    def readable_sockets(self) -> Sequence[socket.socket]:
        """Return the sockets to poll; `deal` has work when one of them is readable."""
        return [self._listener] if self._serving and self._pending is None else []

    def open(self, index: int) -> ConnectionHandle:
        """Return the handle for a new process, which has no connections yet."""
        self.drop(index)
        supervisor_end, process_end = socket.socketpair()
        supervisor_end.setblocking(False)
        self._channels[index] = supervisor_end, process_end
        self._num_passed[index] = self._closed[index] = 0
        return ConnectionHandle(process_end, self._file, index)

    def admit(self, index: int) -> None:
        """Start passing connections to a process that has received its handle and is ready to serve."""
        channels = self._channels[index]
        if channels is not None and index not in self._serving:
            channels[1].close()
            self._serving.add(index)

    def drop(self, index: int) -> None:
        """Stop passing connections to a process, and close its channel."""
        self._serving.discard(index)
        for end in self._channels[index] or ():
            end.close()
        self._channels[index] = None

    def deal(self) -> None:
        """Accept the waiting connections, `MAX_ACCEPTS` at most, and pass each of them to a process."""
        for _ in range(MAX_ACCEPTS):
            if not self._serving:
                return
            if self._pending is None:
                try:
                    self._pending, _ = self._listener.accept()
                except BlockingIOError:
                    return
                except ConnectionAbortedError:
                    continue
                except OSError as error:  # out of file descriptors: wait until some are closed
                    log.warning("A connection could not be accepted: %s", error)
                    time.sleep(PAUSE_S)
                    return
            if not self._pass_to_process(self._pending):
                return
            self._pending.close()
            self._pending = None

    def _pass_to_process(self, connection: socket.socket) -> bool:
        """Pass a connection to the process with the fewest open connections; among equals, to the one that
        received the fewest. Return whether a process took the connection."""
        for index in sorted(
            self._serving, key=lambda i: (self._num_passed[i] - self._closed[i], self._num_passed[i])
        ):
            channels = self._channels[index]
            assert channels is not None
            try:
                socket.send_fds(channels[0], [b"c"], [connection.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                self.drop(index)
                continue
            except OSError:  # the channel is full: the process has not read its earlier messages
                continue
            self._num_passed[index] += 1
            return True
        return False

    def close(self) -> None:
        self._listener.close()
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        for index in range(len(self._channels)):
            self.drop(index)


class ConnectionSource:
    """Source of the connections of an API process: accepted here, or received from the supervisor."""

    def __init__(self) -> None:
        self._connect: Callable[[socket.socket], asyncio.Task[None]]
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, make_protocol: Callable[[], asyncio.Protocol], ssl: object) -> None:
        """Start to handle connections in the running event loop, with a new protocol instance for each."""
        loop = asyncio.get_running_loop()

        async def connect(connection: socket.socket) -> None:
            try:
                await loop.connect_accepted_socket(make_protocol, connection, ssl=ssl)  # type: ignore[arg-type]
            except OSError:  # the client is gone, or does not use TLS
                connection.close()
                self.count_closed()

        self._connect = lambda connection: loop.create_task(connect(connection))

    def stop(self) -> None:
        raise NotImplementedError

    def count_closed(self) -> None:
        """Count a closed connection. This does nothing unless the supervisor passes the connections, since it
        then needs the number of open ones."""

    def _connect_socket(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        task = self._connect(connection)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ConnectionAcceptor(ConnectionSource):
    """Accepts from listening sockets, many connections in one turn of the event loop.

    uvloop accepts one connection per turn. In a flood of connections, each turn also handles requests of
    many open connections. A new connection would wait one such turn for each connection queued before it.
    """

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        super().__init__()
        self._listeners = listeners
        self._warn = FirstWarning(log, "A connection could not be accepted")

    def start(self, make_protocol: Callable[[], asyncio.Protocol], ssl: object) -> None:
        super().start(make_protocol, ssl)
        for listener in self._listeners:
            listener.setblocking(False)
            self._listen(listener)

    def stop(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # `stop` may have closed the listener during a pause
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of file descriptors: wait until some are closed
                self._warn(str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(PAUSE_S, self._listen, listener)
                return
            self._connect_socket(connection)


class ConnectionReceiver(ConnectionSource):
    """Receives connections from the supervisor in an API process, and counts the closed connections."""

    def __init__(self, handle: ConnectionHandle) -> None:
        super().__init__()
        self._channel = handle.channel
        self._channel.setblocking(False)
        self._index = handle.index
        self._closed = np.memmap(handle.closed_file, np.int64, "r+")

    def start(self, make_protocol: Callable[[], asyncio.Protocol], ssl: object) -> None:
        super().start(make_protocol, ssl)
        asyncio.get_running_loop().add_reader(self._channel, self._receive)

    def count_closed(self) -> None:
        self._closed[self._index] += 1

    def stop(self) -> None:
        """Take over the connections that the supervisor has passed so far, and receive no more."""
        asyncio.get_running_loop().remove_reader(self._channel)
        self._receive()
        self._channel.close()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                if not message:
                    asyncio.get_running_loop().remove_reader(self._channel)
                    return
                if not descriptors:  # out of file descriptors: the kernel has closed the connection
                    self.count_closed()
                for descriptor in descriptors:
                    self._connect_socket(socket.socket(fileno=descriptor))
