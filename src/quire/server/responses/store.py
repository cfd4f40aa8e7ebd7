"""Responses that run in the background, and a store of responses in memory, limited in count, bytes and
age."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Message

from quire.config.env import StoreLimits
from quire.errors import EngineError, QuireError, TooMany
from quire.frontend.output_stream import Outputs
from quire.logs import get_logger
from quire.server.http.errors import NotFound
from quire.server.http.in_flight import RunningRequests
from quire.server.responses.encoder import ResponseEncoder
from quire.server.responses.items import Item

logger = get_logger(__name__)


class BackgroundRun:
    """Feeds the engine's outputs of a response to its encoder and keeps the events for streaming clients."""

    def __init__(
        self, outputs: Outputs, encoder: ResponseEncoder, *, keeps_events: bool, on_end: Callable[[], None]
    ) -> None:
        self.encoder = encoder
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        """Encoded events; the index of an event is its sequence number."""
        self.num_bytes = 0
        """Total size of the events."""
        self.has_ended = False
        self._outputs, self._on_end = outputs, on_end
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def start(self, running_requests: RunningRequests) -> None:
        """Start generating. The run ends with the response or when the server shuts down."""
        self._task = asyncio.create_task(self._run(running_requests))

    async def _run(self, running_requests: RunningRequests) -> None:
        failure: Exception | None = None
        try:
            await running_requests.until_disconnect(_never_gone, self._read())
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("A background response failed with an internal error")
            failure = error
        try:
            await self._outputs.aclose()
        finally:
            self._end(failure)

    async def _read(self) -> None:
        async for output in self._outputs:
            self._add(self.encoder.events(output))

    def _end(self, failure: Exception | None, status: str = "failed") -> None:
        """Mark the run as ended and wake all waiting clients, even if encoding the last events fails."""
        if self.has_ended:
            return
        events: list[bytes] = []
        try:
            events = self._last_events(failure, status)
        finally:
            self.has_ended = True
            self._add(events)
            self._on_end()

    def _last_events(self, failure: Exception | None, status: str) -> list[bytes]:
        if failure is None:
            try:
                return self.encoder.last_events()
            except Exception as error:
                logger.exception("The last events of a background response could not be encoded")
                failure = error
        return self.encoder.failure_events(failure, status)

    def _add(self, events: list[bytes]) -> None:
        if self.keeps_events:
            self.events += events
            self.num_bytes += sum(map(len, events))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def cancel(self) -> None:
        """Cancel the run, unless it has ended, and wait for its end."""
        if self._task is None or self.has_ended:
            return
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
            await self._outputs.aclose()
        finally:
            self._end(EngineError("the response was cancelled"), "cancelled")

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield the encoded events after sequence number `after`: past events at once, later ones as they
        arrive, until the run has ended."""
        index = after + 1
        while True:
            changed = self._changed
            while index < len(self.events):
                yield self.events[index]
                index += 1
            if self.has_ended:
                return
            await changed.wait()


async def _never_gone() -> Message:
    """Wait forever: a background response does not depend on its client's connection."""
    await asyncio.Event().wait()
    raise AssertionError


NO_STORE = (
    "this server stores no responses; start it with VLLM_ENABLE_RESPONSES_API_STORE=1, or send all items as "
    "`input` and leave `store`, `background` and `previous_response_id` out"
)


class StoreFull(TooMany):
    """Raised when more responses run in the background than the store can hold."""


class StoredTurn:
    """Items of one turn of a conversation: one request's input or one response's output. Later responses of
    the conversation refer to the same object."""

    def __init__(self, items: list[Item], owner: int = 0) -> None:
        """Create a turn that only the tenant `owner` may read."""
        self.items = items
        self.owner = owner
        self.num_bytes = len(msgspec.json.encode(items))


@dataclass(slots=True)
class StoredResponse:
    """A response and the turns of the conversation that it answers."""

    response: dict[str, Any]
    """The final response; before the end of generation, only the fields that do not change."""
    input_turns: tuple[StoredTurn, ...]
    output_turn: StoredTurn | None = None
    run: BackgroundRun | None = None
    """The background run; None for a response that was not generated in the background."""
    stored_at: float = 0.0
    num_bytes: int = 0
    """Size in bytes of the response and its events, without its turns."""
    counted_turns: tuple[StoredTurn, ...] = ()
    """Turns that the store has counted for this response, and releases when the response is dropped."""

    @property
    def turns(self) -> tuple[StoredTurn, ...]:
        return self.input_turns if self.output_turn is None else (*self.input_turns, self.output_turn)

    @property
    def owner(self) -> int:
        return self.input_turns[-1].owner

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.has_ended

    def as_dict(self) -> dict[str, Any]:
        """Return the response in its present state, also if its last events could not be encoded."""
        run = self.run
        if run is None or (run.has_ended and self.output_turn is not None):
            return self.response
        return run.encoder.as_dict()


@dataclass(slots=True)
class ResponseStore:
    """Store of responses by id, oldest first, which drops responses to keep its limits."""

    limits: StoreLimits
    now: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    _responses: dict[str, StoredResponse] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)
    """Number of responses that use a turn, by `id()` of the turn."""
    _items: dict[tuple[int, str], dict[int, Item]] = field(default_factory=dict)
    """Items by owner and item id, then by `id()` of the turn: several turns may have an item of that id."""

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, id: str, owner: int = 0, *, param: str = "response_id") -> StoredResponse:
        """Return the stored response of tenant `owner`; raise NotFound if there is none. `param`: the request
        field with the id, for the error."""
        self.expire()
        if id not in self._responses or self._responses[id].owner != owner:
            raise NotFound(f"Response with id {id!r:.80} not found.", param=param)
        return self._responses[id]

    def item(self, id: str, owner: int = 0) -> Item | None:
        """Return a stored item, or None. Call `expire` before; this method changes nothing, so that threads
        may call it."""
        return next(iter([*self._items.get((owner, id), {}).values()]), None)

    def put(self, stored: StoredResponse) -> None:
        """Store or update a response. If the store then exceeds a limit, drop the oldest responses that have
        ended."""
        id = stored.response["id"]
        num_bytes = len(msgspec.json.encode(stored.response)) + (stored.run.num_bytes if stored.run else 0)
        self.drop(id)
        stored.num_bytes = num_bytes
        stored.stored_at = self.now()
        self._responses[id] = stored
        self.num_bytes += stored.num_bytes
        stored.counted_turns = stored.turns
        for turn in stored.counted_turns:
            self._add_turn(turn)
        self.expire()

    def check_room(self) -> None:
        """Raise StoreFull if one more background response does not fit."""
        self.expire()
        running = [stored for stored in self._responses.values() if stored.is_running]
        if len(running) >= self.limits.max_count:
            raise StoreFull(
                f"{self.limits.max_count} responses run in the background, the maximum; "
                "try again when one of them has ended"
            )
        turns = {id(turn): turn.num_bytes for stored in running for turn in stored.counted_turns}
        response_bytes = sum(stored.num_bytes + stored.run.num_bytes for stored in running if stored.run)
        if sum(turns.values()) + response_bytes >= self.limits.max_bytes:
            raise StoreFull(
                f"the responses that run in the background fill the store of {self.limits.max_bytes} bytes; "
                "try again when one of them has ended"
            )

    def drop(self, id: str) -> StoredResponse | None:
        stored = self._responses.pop(id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            for turn in stored.counted_turns:
                self._release_turn(turn)
        return stored

    def _add_turn(self, turn: StoredTurn) -> None:
        count = self._users.get(id(turn), 0)
        self._users[id(turn)] = count + 1
        if not count:
            self.num_bytes += turn.num_bytes
            for item in turn.items:
                self._items.setdefault((turn.owner, item["id"]), {})[id(turn)] = item

    def _release_turn(self, turn: StoredTurn) -> None:
        count = self._users[id(turn)] - 1
        if count > 0:
            self._users[id(turn)] = count
            return
        del self._users[id(turn)]
        self.num_bytes -= turn.num_bytes
        for item in turn.items:
            items = self._items.get(key := (turn.owner, item["id"]), {})
            items.pop(id(turn), None)
            if not items:
                self._items.pop(key, None)

    def expire(self) -> None:
        """Drop the responses that are too old and, while the store exceeds a limit, the oldest ones. Running
        responses are not dropped."""
        limits, now = self.limits, self.now()
        for id, stored in list(self._responses.items()):
            is_expired = now - stored.stored_at > limits.ttl_s
            if (
                not is_expired
                and len(self._responses) <= limits.max_count
                and self.num_bytes <= limits.max_bytes
            ):
                return
            if not stored.is_running:
                self.drop(id)
