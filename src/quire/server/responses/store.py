"""An in-memory store of responses, limited in count, bytes and age."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.config.env import StoreLimits
from quire.server.http.errors import NotFound, TooMany
from quire.server.responses.items import Item
from quire.server.responses.run import BackgroundRun

NO_STORE = (
    "this server stores no responses; start it with VLLM_ENABLE_RESPONSES_API_STORE=1, or send all items as "
    "`input` and leave `store`, `background` and `previous_response_id` out"
)


class Full(TooMany):
    """Raised when more responses run in the background than the store can hold."""


class StoredTurn:
    """Items that were received or generated together. Later responses of the conversation share them."""

    def __init__(self, items: list[Item], owner: int = 0) -> None:
        """Create a turn that only the tenant `owner` may read."""
        self.items = items
        self.owner = owner
        self.num_bytes = len(msgspec.json.encode(items))


@dataclass(slots=True)
class StoredResponse:
    """A response and the turns of the conversation that it answers."""

    response: dict[str, Any]
    """The final response; while it runs, the fields that do not change."""
    input_turns: tuple[StoredTurn, ...]
    output_turn: StoredTurn | None = None
    run: BackgroundRun | None = None
    """The background run, if there is one."""
    kept_at: float = 0.0
    num_bytes: int = 0
    """Size of the response without its turns."""
    held: tuple[StoredTurn, ...] = ()
    """Turns that the store counts for this response."""

    @property
    def turns(self) -> tuple[StoredTurn, ...]:
        return self.input_turns if self.output_turn is None else (*self.input_turns, self.output_turn)

    @property
    def owner(self) -> int:
        return self.input_turns[-1].owner

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.is_over

    def shown(self) -> dict[str, Any]:
        """Return the response in its present state, also if its last events could not be encoded."""
        run = self.run
        if run is None or (run.is_over and self.output_turn is not None):
            return self.response
        return run.encoder.shown()


@dataclass(slots=True)
class Store:
    """Responses by id, in the order in which they were stored."""

    limits: StoreLimits
    now: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    _kept: dict[str, StoredResponse] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)
    """Number of responses that use a turn, by `id()` of the turn."""
    _items: dict[tuple[int, str], dict[int, Item]] = field(default_factory=dict)
    """Items by owner and item id, then by `id()` of the turn: several turns may have an item of that id."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, id: str, owner: int = 0, *, param: str = "response_id") -> StoredResponse:
        """Return a stored response. `param`: the request field that names it, for the error."""
        self._expire()
        if id not in self._kept or self._kept[id].owner != owner:
            raise NotFound(f"Response with id {id!r:.80} not found.", param=param)
        return self._kept[id]

    def item(self, id: str, owner: int = 0) -> Item | None:
        self._expire()
        return next(iter(self._items.get((owner, id), {}).values()), None)

    def put(self, stored: StoredResponse) -> None:
        """Store or update a response. The oldest responses that have ended are dropped above the limits."""
        id = stored.response["id"]
        num_bytes = len(msgspec.json.encode(stored.response)) + (stored.run.num_bytes if stored.run else 0)
        self.drop(id)
        stored.num_bytes = num_bytes
        stored.kept_at = self.now()
        self._kept[id] = stored
        self.num_bytes += stored.num_bytes
        stored.held = stored.turns
        for turn in stored.held:
            self._add_turn(turn)
        self._expire()

    def check_room(self) -> None:
        """Raise Full if one more background response does not fit."""
        self._expire()
        running = [stored for stored in self._kept.values() if stored.is_running]
        if len(running) >= self.limits.max_count:
            raise Full(
                f"{self.limits.max_count} responses run in the background, the maximum; "
                "try again when one of them has ended"
            )
        turns = {id(turn): turn.num_bytes for stored in running for turn in stored.held}
        grown = sum(stored.num_bytes + stored.run.num_bytes for stored in running if stored.run)
        if sum(turns.values()) + grown >= self.limits.max_bytes:
            raise Full(
                f"the responses that run in the background fill the store of {self.limits.max_bytes} bytes; "
                "try again when one of them has ended"
            )

    def drop(self, id: str) -> StoredResponse | None:
        stored = self._kept.pop(id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            for turn in stored.held:
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

    def _expire(self) -> None:
        limits, now = self.limits, self.now()
        for id, stored in list(self._kept.items()):
            old = now - stored.kept_at > limits.ttl_s
            if not old and len(self._kept) <= limits.max_count and self.num_bytes <= limits.max_bytes:
                return
            if not stored.is_running:
                self.drop(id)
