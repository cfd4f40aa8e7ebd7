"""`LoRAResolver` locates adapters by name alone; `AdapterSearch` looks them up in stores that may not
respond."""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from quire.checkpoint.object_store import is_url
from quire.errors import EngineDead, RequestError
from quire.logs import get_logger
from quire.server.http.errors import Forbidden, NotFound
from quire.server.lora.locations import LoRALocations
from quire.server.lora.modules import LoRAModule, name_problem

T = TypeVar("T")

SEARCH_S = 600.0
"""Seconds that a lookup may take, including a large download."""
_MAX_THREADS = 4


class AdapterSearch:
    """Runs blocking lookups of adapters in at most `_MAX_THREADS` threads. A caller gets an error after
    `SEARCH_S` seconds. A lookup that never returns occupies its thread until the process ends."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_MAX_THREADS)

    async def __call__(self, call: Callable[[str], T], location: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SEARCH_S):
                await self._slots.acquire()
                future: asyncio.Future[T] = loop.create_future()

                def work() -> None:
                    try:
                        set_outcome = partial(future.set_result, call(location))
                    except Exception as error:
                        set_outcome = partial(future.set_exception, error)
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(self._end, future, set_outcome)

                threading.Thread(target=work, name="adapters", daemon=True).start()
                return await future
        except TimeoutError:
            raise EngineDead(
                f"the location of the adapter has not responded within {SEARCH_S:g} s; try again later"
            ) from None

    def _end(self, future: asyncio.Future[T], set_outcome: Callable[[], None]) -> None:
        self._slots.release()
        if not future.done():  # the caller still waits
            set_outcome()


logger = get_logger(__name__)

RETRY_S = 10.0
"""Seconds until a name that was not found is looked up again: clients must not cause unlimited requests to
a store or unlimited loads of a broken adapter."""
_MAX_REMEMBERED = 4096


class LoRAResolver:
    """Finds adapters in a folder, local or remote, and on the hub."""

    def __init__(self, folder: str | None, locations: LoRALocations) -> None:
        self._folder = folder.rstrip("/") if folder else None
        self._locations = locations
        self._failed: OrderedDict[str, tuple[float, RequestError | None]] = OrderedDict()

    def may_find(self, name: str) -> bool:
        """Whether the folder or hub of the LoRA resolver may have an adapter of this name. If loading it has
        failed within the last `RETRY_S` seconds, this error is raised again."""
        failed_at, error = self._failed.get(name, (float("-inf"), None))
        if time.monotonic() - failed_at < RETRY_S:
            if error is not None:
                raise RequestError(str(error), error.param)
            return False
        return self._location_of(name) is not None

    def find(self, name: str) -> LoRAModule | None:
        """Return the adapter of this name, or None if there is none. This may block for long."""
        location = self._location_of(name)
        assert location is not None
        try:
            path = self._locations.for_client(location)
        except (NotFound, Forbidden):
            self.remember_failure(name, None)
            return None
        except RequestError as error:
            logger.warning("LoRA adapter %r could not be located: %s", name, error)
            raise EngineDead("the adapter store is not available; try again later") from None
        return LoRAModule(name, location, str(path), within=self._locations.bounds(path))

    def remember_failure(self, name: str, error: RequestError | None) -> None:
        """Remember that an adapter does not exist (`error` is None) or cannot be loaded. A name that is
        missing in a local folder is not remembered."""
        if self._folder is None or is_url(self._folder) or error is not None or "/" in name:
            self._failed[name] = time.monotonic(), error
            self._failed.move_to_end(name)
            if len(self._failed) > _MAX_REMEMBERED:
                self._failed.popitem(last=False)

    def _location_of(self, name: str) -> str | None:
        if name_problem(name):
            return None
        if self._folder is not None and "/" not in name and "\\" not in name and not name.startswith("."):
            return f"{self._folder}/{name}"
        return name if self._locations.allows_hub_id(name) else None
