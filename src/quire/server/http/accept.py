"""Connections of one listening socket, dealt evenly to several processes.

Processes that accept from one socket do not share it: whoever wakes up first takes all that wait. So the
supervisor alone accepts, and hands each connection to the process that has the fewest open.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.logs import get_logger

log = get_logger(__name__)

MOST_AT_ONCE = 256
"""Connections dealt before the supervisor looks after its other duties."""
PAUSE_S = 0.05


@dataclass(frozen=True)
class Hand:
    """What a process needs to be dealt connections."""

    channel: socket.socket
    """A message per connection, with its descriptor."""
    closed_file: Path
    index: int


class Dealer:
    """The supervisor's side. A process gets connections from `admit` to `drop`."""

    def __init__(self, listener: socket.socket, closed_file: Path, count: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._file = closed_file
        np.zeros(count, np.int64).tofile(closed_file)
        self._closed = np.memmap(closed_file, np.int64, "r+")
        """Connections that each process has closed, as it counts them itself."""
        self._given = [0] * count
        self._channels: list[tuple[socket.socket, socket.socket] | None] = [None] * count
        """By process: our end and its end."""
        self._up: set[int] = set()
        self._held: socket.socket | None = None
        """Accepted, and nobody could take it yet."""

    @property
    def awaited(self) -> Sequence[socket.socket]:
        """What to wait for before `deal` has something to do."""
        return [self._listener] if self._up and self._held is None else []

    def open(self, index: int) -> Hand:
        """A hand for a new process, which has no connections yet."""
        self.drop(index)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._channels[index] = ours, theirs
        self._given[index] = self._closed[index] = 0
        return Hand(theirs, self._file, index)

    def admit(self, index: int) -> None:
        """The process has its end of the channel, and serves."""
        channels = self._channels[index]
        if channels is not None and index not in self._up:
            channels[1].close()
            self._up.add(index)

    def drop(self, index: int) -> None:
        """The process is gone."""
        self._up.discard(index)
        for end in self._channels[index] or ():
            end.close()
        self._channels[index] = None

    def deal(self) -> None:
        """Hand on what waits."""
        for _ in range(MOST_AT_ONCE):
            if not self._up:
                return
            if self._held is None:
                try:
                    self._held, _ = self._listener.accept()
                except BlockingIOError:
                    return
                except ConnectionAbortedError:
                    continue
                except OSError as error:  # there are no descriptors left: wait for some
                    log.warning("a connection could not be accepted: %s", error)
                    time.sleep(PAUSE_S)
                    return
            if not self._hand_on(self._held):
                return
            self._held.close()
            self._held = None

    def _hand_on(self, connection: socket.socket) -> bool:
        """Give it to whoever has the fewest open; of those, to whoever has had the fewest."""
        for index in sorted(self._up, key=lambda i: (self._given[i] - self._closed[i], self._given[i])):
            channels = self._channels[index]
            assert channels is not None
            try:
                socket.send_fds(channels[0], [b"c"], [connection.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                self.drop(index)
                continue
            except OSError:  # it has not taken what it was dealt before
                continue
            self._given[index] += 1
            return True
        return False

    def close(self) -> None:
        """Refuse new connections."""
        self._listener.close()
        if self._held is not None:
            self._held.close()
            self._held = None
        for index in range(len(self._channels)):
            self.drop(index)


class Taker:
    """A process's side: takes what it is dealt, and counts what it has closed."""

    def __init__(self, hand: Hand) -> None:
        self._channel = hand.channel
        self._channel.setblocking(False)
        self._index = hand.index
        self._closed = np.memmap(hand.closed_file, np.int64, "r+")
        self._connect: Callable[[socket.socket], asyncio.Task[None]]
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, make_protocol: Callable[[], asyncio.Protocol], ssl: object) -> None:
        """Speak a protocol of its own on each connection, from inside the running loop."""
        loop = asyncio.get_running_loop()

        async def connect(connection: socket.socket) -> None:
            try:
                await loop.connect_accepted_socket(make_protocol, connection, ssl=ssl)  # type: ignore[arg-type]
            except OSError:  # it is gone, or does not speak TLS
                connection.close()
                self.count_closed()

        self._connect = lambda connection: loop.create_task(connect(connection))
        loop.add_reader(self._channel, self._take)

    def count_closed(self) -> None:
        self._closed[self._index] += 1

    def stop(self) -> None:
        """Take what was dealt so far, and no more."""
        asyncio.get_running_loop().remove_reader(self._channel)
        self._take()
        self._channel.close()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                if not message:
                    asyncio.get_running_loop().remove_reader(self._channel)
                    return
                if not descriptors:  # there was none left for it, and the kernel has closed the connection
                    self.count_closed()
                for descriptor in descriptors:
                    connection = socket.socket(fileno=descriptor)
                    connection.setblocking(False)
                    task = self._connect(connection)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
