"""Room: how many bytes of items are held at once, by one request and by all of them."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from quire.errors import RequestError


class Room:
    """Bytes that all requests may hold. Who wants more than is left waits until others are done; who has held
    some for the longest never does, so that somebody always ends."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()  # several event loops may share it
        self._holds: dict[Hold, None] = {}
        """Those that hold some, the oldest first."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @contextlib.contextmanager
    def hold(self, share: "Share") -> Iterator["Hold"]:
        """What is taken is given back at the end."""
        held = Hold(self, share)
        try:
            yield held
        finally:
            self.give(held, held.num_bytes)

    async def take(self, hold: "Hold", num_bytes: int) -> None:
        while True:
            with self._lock:
                self._holds.setdefault(hold)
                if num_bytes <= self._left or next(iter(self._holds)) is hold:
                    self._left -= num_bytes
                    hold.num_bytes += num_bytes
                    return
                if not hold.num_bytes:
                    del self._holds[hold]
                turn = asyncio.Event()
                self._waiting.append((asyncio.get_running_loop(), turn))
            await turn.wait()

    def give(self, hold: "Hold", num_bytes: int) -> None:
        with self._lock:
            self._left += num_bytes
            hold.num_bytes -= num_bytes
            if not hold.num_bytes:
                self._holds.pop(hold, None)
            waiting, self._waiting = self._waiting, []
        for loop, turn in waiting:
            with contextlib.suppress(RuntimeError):  # the loop of one that gave up may be over
                loop.call_soon_threadsafe(turn.set)


class Share:
    """Bytes of the items of one request."""

    def __init__(self, most: int) -> None:
        self._most, self._num_bytes = most, 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._most:
            raise RequestError(
                f"with it the media of the request have at least {self._num_bytes} bytes, and together they "
                f"may have {self._most} (QUIRE_MEDIA_MAX_MB)"
            )


class Hold:
    """What one item takes of a room, for one request."""

    def __init__(self, room: Room, share: Share) -> None:
        self._room, self._share = room, share
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """A RequestError if that is more than the request may have."""
        self._share.add(num_bytes)
        await self._room.take(self, num_bytes)

    def count(self, num_bytes: int) -> None:
        """The request has brought so many, which need not be held. A RequestError as above."""
        self._share.add(num_bytes)

    def give(self, num_bytes: int) -> None:
        """What came of a try that failed; the next one begins anew."""
        self._share.add(-num_bytes)
        self._room.give(self, num_bytes)
