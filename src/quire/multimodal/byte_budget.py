"""Limits on the bytes of media in memory, for one request and for all requests together."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

from quire.errors import RequestError


class ByteBudget:
    """A limit on the bytes that all requests together may reserve. Each item reserves bytes through a
    `BudgetHold`, which waits while too few are free. The oldest hold that has reserved bytes never waits, so
    that holds cannot deadlock."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._left = num_bytes
        self._lock = threading.Lock()  # several event loops may share the budget
        self._holds: dict[BudgetHold, None] = {}
        """Holds that have reserved bytes, the oldest first."""
        self._waiting: list[Callable[[], object]] = []
        """Callbacks that wake the reservations which wait for free bytes."""

    @contextlib.contextmanager
    def hold(self, share: "BudgetShare | None" = None) -> Iterator["BudgetHold"]:
        """Yield a hold through which one item reserves bytes; all of its bytes are released when the `with`
        block ends. `share` is the limit of the item's request; None if there is none."""
        held = BudgetHold(self, share)
        try:
            yield held
        finally:
            self.release(held, held.num_bytes)

    async def take(self, hold: "BudgetHold", num_bytes: int) -> None:
        while True:
            released = asyncio.Event()
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, released.set)
            if self._try_take(hold, num_bytes, wake):
                return
            await released.wait()

    def take_blocking(self, hold: "BudgetHold", num_bytes: int) -> None:
        """Reserve bytes for a hold, and block until they are free. Raise a RequestError if the hold would
        have more bytes than the whole budget."""
        if hold.num_bytes + num_bytes > self._num_bytes:
            raise RequestError(
                f"decoding it needs at least {hold.num_bytes + num_bytes} bytes, and all items together may "
                f"use {self._num_bytes} (four times QUIRE_MEDIA_MAX_MB): send a smaller or a shorter one"
            )
        while True:
            released = threading.Event()
            if self._try_take(hold, num_bytes, released.set):
                return
            released.wait()

    def _try_take(self, hold: "BudgetHold", num_bytes: int, wake: Callable[[], object]) -> bool:
        """Reserve bytes without blocking and return True if enough are free; else return False, and call
        `wake` at the next release of any bytes."""
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

    def release(self, hold: "BudgetHold", num_bytes: int) -> None:
        with self._lock:
            self._left += num_bytes
            hold.num_bytes -= num_bytes
            if not hold.num_bytes:
                self._holds.pop(hold, None)
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            with contextlib.suppress(RuntimeError):  # the loop of a cancelled request may be closed
                wake()


class BudgetShare:
    """A limit on the bytes of all media items of one request together, which several `BudgetHold` count
    towards."""

    def __init__(self, most: int) -> None:
        self._most, self._num_bytes = most, 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._most:
            raise RequestError(
                f"the media of the request have at least {self._num_bytes} bytes, and at most {self._most} "
                "are allowed (QUIRE_MEDIA_MAX_MB)"
            )


class BudgetHold:
    """Reservation of bytes in a `ByteBudget` for one item (image, video or audio) of a request."""

    def __init__(self, budget: ByteBudget, share: BudgetShare | None) -> None:
        """Build an empty reservation in `budget`. `share` counts the bytes towards the limit of the item's
        request; None if there is no such limit."""
        self._budget, self._share = budget, share
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Count bytes towards the limit of the request, and wait until the budget of the process has that
        many free. Raise a RequestError if the request would have more than its limit."""
        self.count(num_bytes)
        await self._budget.take(self, num_bytes)

    def take_blocking(self, num_bytes: int) -> None:
        """Reserve bytes and block until they are free. They do not count towards the request's limit."""
        self._budget.take_blocking(self, num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count bytes towards the request's limit without reserving them; raise a RequestError above it."""
        if self._share is not None:
            self._share.add(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Release bytes of a failed attempt, which no longer count towards the request's limit."""
        self.count(-num_bytes)
        self._budget.release(self, num_bytes)
