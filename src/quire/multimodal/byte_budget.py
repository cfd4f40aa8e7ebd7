"""Room: how many bytes of items are held at once, by one request and by all of them."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

from quire.errors import RequestError


class ByteBudget:
    """Bytes that all requests may hold. Who wants more than is left waits until others are done; who has held
    some for the longest never does, so that somebody always ends."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._left = num_bytes
        self._lock = threading.Lock()  # several event loops may share it
        self._holds: dict[BudgetHold, None] = {}
        """Those that hold some, the oldest first."""
        self._waiting: list[Callable[[], object]] = []
        """What wakes those that wait."""

    @contextlib.contextmanager
    def hold(self, share: "BudgetShare | None" = None) -> Iterator["BudgetHold"]:
        """What is taken is given back at the end."""
        held = BudgetHold(self, share)
        try:
            yield held
        finally:
            self.give(held, held.num_bytes)

    async def take(self, hold: "BudgetHold", num_bytes: int) -> None:
        while True:
            turn = asyncio.Event()
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, turn.set)
            if self._took(hold, num_bytes, wake):
                return
            await turn.wait()

    def take_here(self, hold: "BudgetHold", num_bytes: int) -> None:
        """The same in a thread, which waits. A RequestError if one item wants more than there is at all."""
        if hold.num_bytes + num_bytes > self._num_bytes:
            raise RequestError(
                f"to decode it takes at least {hold.num_bytes + num_bytes} bytes, and all items together may "
                f"take {self._num_bytes} (four times QUIRE_MEDIA_MAX_MB): send a smaller or a shorter one"
            )
        while True:
            turn = threading.Event()
            if self._took(hold, num_bytes, turn.set):
                return
            turn.wait()

    def _took(self, hold: "BudgetHold", num_bytes: int, wake: Callable[[], object]) -> bool:
        """Whether the bytes are taken; if not, `wake` is called when others have given some back."""
        with self._lock:
            self._holds.setdefault(hold)
            if num_bytes <= self._left or next(iter(self._holds)) is hold:
                self._left -= num_bytes
                hold.num_bytes += num_bytes
                return True
            if not hold.num_bytes:
                del self._holds[hold]
            self._waiting.append(wake)
            return False

    def give(self, hold: "BudgetHold", num_bytes: int) -> None:
        with self._lock:
            self._left += num_bytes
            hold.num_bytes -= num_bytes
            if not hold.num_bytes:
                self._holds.pop(hold, None)
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            with contextlib.suppress(RuntimeError):  # the loop of one that gave up may be over
                wake()


class BudgetShare:
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


class BudgetHold:
    """What one item takes of a room, for one request."""

    def __init__(self, room: ByteBudget, share: BudgetShare | None) -> None:
        """Without a share no request is charged: only the room is limited."""
        self._room, self._share = room, share
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """A RequestError if that is more than the request may have."""
        self.count(num_bytes)
        await self._room.take(self, num_bytes)

    def take_here(self, num_bytes: int) -> None:
        """The same in a thread, of what the request need not answer for."""
        self._room.take_here(self, num_bytes)

    def count(self, num_bytes: int) -> None:
        """The request has brought so many, which need not be held. A RequestError as above."""
        if self._share is not None:
            self._share.add(num_bytes)

    def give(self, num_bytes: int) -> None:
        """What came of a try that failed; the next one begins anew."""
        self.count(-num_bytes)
        self._room.give(self, num_bytes)
