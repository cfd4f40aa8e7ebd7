"""Media in plans: which items go through their towers, in which step, and whose vectors are kept."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from quire.data.multimodal import Arrays, Media, MediaItem
from quire.data.plan import Ints
from quire.data.request import Request
from quire.sched.limits import StepLimits
from quire.sched.running import Running


class Shelf:
    """The arrays of the items of all requests that are here, by key, each once."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, Arrays] = {}
        self._num_users: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._num_users)

    def add(self, media: Media) -> None:
        """Those of a request; what others have brought before serves it, too."""
        for item in media.items:
            self._num_users[item.key] = self._num_users.get(item.key, 0) + 1
            if item.arrays is not None:
                item.arrays = self._arrays.setdefault(item.key, item.arrays)

    def drop(self, media: Media) -> None:
        """The request has ended."""
        for item in media.items:
            self._num_users[item.key] -= 1
            if not self._num_users[item.key]:
                del self._num_users[item.key]
                self._arrays.pop(item.key, None)

    def filled(self, item: MediaItem) -> MediaItem:
        """With its arrays, if they are here."""
        if item.arrays is not None or item.stored is not None:
            return item
        return msgspec.structs.replace(item, arrays=self._arrays.get(item.key))


def stripped(media: Media | None) -> Media | None:
    """Without arrays, as rows know it."""
    if media is None:
        return None
    bare = [msgspec.structs.replace(item, arrays=None, stored=None) for item in media.items]
    return msgspec.structs.replace(media, items=bare)


@dataclass(slots=True)
class _Entry:
    """Vectors that the worker has, or will have when it comes to a step."""

    num_vectors: int
    num_users: int = 0


@dataclass(slots=True)
class _Row:
    """A row with items that are not computed."""

    items: list[MediaItem]
    num_taken: int
    """Of the first items: the row holds their vectors,"""
    num_done: int
    """or has given them back, as of so many."""
    whole: int = 0
    """As in `Media`."""


@dataclass(slots=True)
class _Outlook:
    """What a step would hold and make, were it to take this and that."""

    num_held: int
    num_made: int
    keys: set[bytes] = field(default_factory=set)


class EncoderCache:
    """Who has the vectors of which items, by key.

    An item is encoded whole in the step whose chunk first touches it, and held by the row until the last of
    its tokens is computed. What nobody holds stays until there is no room for it, the oldest goes first.
    """

    def __init__(self, *, size: int = 0, most_made: int | None = None, whole: bool = False) -> None:
        """`size` in vectors: of what is kept, and of what one step makes, unless that is less. Larger items
        come alone. `whole` ones are not divided between steps."""
        self.size = size
        self.most_made = size if most_made is None else most_made
        self.whole = whole
        self.shelf = Shelf()
        self.rows: dict[int, _Row] = {}
        self.num_held = self.num_kept = self.num_made = 0
        """Vectors: that somebody holds, that there are, and that the next step makes."""
        self._kept: dict[bytes, _Entry] = {}
        self._idle: dict[bytes, None] = {}
        """Those that nobody holds, oldest first."""
        self._encodes: list[MediaItem] = []
        self._forgotten: list[bytes] = []

    # ---- requests come and go

    def add(self, request: Request, limits: StepLimits) -> None:
        if (media := request.media) is not None:
            self.shelf.add(media)
            if self.whole:
                limits.require(max((item.length for item in media.items), default=0))
            limits.require(media.whole)

    def drop(self, request: Request) -> None:
        if request.media is not None:
            self.shelf.drop(request.media)

    def enter(self, row: int, request: Request, num_computed: int, end: int) -> None:
        """It gets a row, and computes its tokens up to `end` in the step that is planned."""
        if request.media is None:
            return
        items, whole = request.media.items, request.media.whole
        num_done = _num_before(items, num_computed)
        if num_done < len(items) or num_computed < whole:
            entered = self.rows[row] = _Row(items, num_done, num_done, whole)
            self._take([(entered, end)])

    def leave(self, row: int) -> None:
        if (left := self.rows.pop(row, None)) is not None:
            self._give_back(left, left.num_taken)

    # ---- chunks

    def cut(self, request: Request, start: int, chunk: int, limits: StepLimits) -> int:
        """How many of so many tokens a request may compute from `start` on, if it gets a row now."""
        if request.media is None or not chunk:
            return chunk
        items = request.media.items
        items = items[_num_before(items, start) :]
        chunk = self._reach(items, start, chunk, self._outlook())
        return self._undivided(self._wholes(items, request.media.whole), start, chunk, limits)[0]

    def allow(self, running: Running, pending: Ints, limits: StepLimits) -> Ints:
        """The same of each row of `running.order`, in this order: up to the first item that cannot be encoded
        in this step."""
        if not self.rows:
            return pending
        self._settle(running)
        pending, outlook = pending.copy(), self._outlook()
        for place, row in self._places(running):
            row_items = self.rows[row]
            most, start = min(int(pending[place]), limits.max_chunk), int(running.num_computed[row])
            pending[place] = self._reach(row_items.items[row_items.num_taken :], start, most, outlook)
        return pending

    def undivided(self, running: Running, chunks: Ints, limits: StepLimits) -> Ints:
        """Where no step may end inside an item: shorter chunks. Who gets nothing for that goes first, and the
        last rows wait for it."""
        if not self.rows or not self.whole:
            return chunks
        chunks, first = chunks.copy(), None
        for place, row in self._places(running):
            if not (chunk := int(chunks[place])):
                continue
            held, start = self.rows[row], int(running.num_computed[row])
            wholes = self._wholes(held.items[held.num_done :], held.whole)
            chunks[place], wanted = self._undivided(wholes, start, chunk, limits)
            if not chunks[place] and first is None:
                first, chunks[place] = place, wanted
        if first is None:
            return chunks
        for place in reversed(range(len(chunks))):
            if chunks.sum() > limits.max_tokens and place != first:
                chunks[place] = 0
        return chunks

    def take(self, running: Running, chunks: Ints) -> None:
        """The rows of `running.order` compute so many tokens."""
        if self.rows:
            ends = running.num_computed[running.order] + chunks
            self._take([(self.rows[row], int(ends[place])) for place, row in self._places(running)])

    def _places(self, running: Running) -> list[tuple[int, int]]:
        """The rows with items, and where they stand in `running.order`."""
        places = np.flatnonzero(np.isin(running.order, list(self.rows)))
        return list(zip(places.tolist(), running.order[places].tolist(), strict=True))

    def _outlook(self) -> _Outlook:
        return _Outlook(self.num_held, self.num_made)

    def _reach(self, items: list[MediaItem], start: int, chunk: int, outlook: _Outlook) -> int:
        """So many tokens, or those in front of an item that does not fit."""
        for item in items:
            if item.offset >= start + chunk:
                break
            if not self._fits(item, outlook):
                return max(item.offset - start, 0)
        return chunk

    def _fits(self, item: MediaItem, outlook: _Outlook) -> bool:
        entry, num_vectors = self._kept.get(item.key), item.num_vectors
        if item.key in outlook.keys or (entry is not None and entry.num_users):
            return True
        num_held, num_made = outlook.num_held + num_vectors, outlook.num_made
        if num_held > self.size and outlook.num_held:
            return False
        if entry is None:
            num_made += num_vectors
            if num_made > self.most_made and outlook.num_made:
                return False
        outlook.num_held, outlook.num_made = num_held, num_made
        outlook.keys.add(item.key)
        return True

    def _wholes(self, items: list[MediaItem], whole: int) -> list[tuple[int, int]]:
        """What no step divides: items, or so many tokens in front; where each begins and ends."""
        if whole:
            return [(0, whole)]
        return [(item.offset, item.end) for item in items] if self.whole else []

    def _undivided(
        self, wholes: list[tuple[int, int]], start: int, chunk: int, limits: StepLimits
    ) -> tuple[int, int]:
        """The chunk, if it does not end inside one of these; else what comes before that, and what it takes
        to have it whole. One that no step can hold is divided all the same."""
        end = start + chunk
        for first, behind in wholes:
            if first < end < behind and behind - max(start, first) <= limits.max_chunk:
                return max(first - start, 0), behind - start
        return chunk, chunk

    # ---- vectors

    def _settle(self, running: Running) -> None:
        """Rows need no vectors of items that are computed: steps run in order."""
        for row, held in list(self.rows.items()):
            self._give_back(held, _num_before(held.items, int(running.num_computed[row])))
            if held.num_done == len(held.items) and running.num_computed[row] >= held.whole:
                del self.rows[row]

    def _give_back(self, row: _Row, num_done: int) -> None:
        for item in row.items[row.num_done : num_done]:
            entry = self._kept[item.key]
            entry.num_users -= 1
            if not entry.num_users:
                self.num_held -= entry.num_vectors
                self._idle[item.key] = None
        row.num_done = max(row.num_done, num_done)

    def _take(self, chunks: list[tuple[_Row, int]]) -> None:
        """Rows compute up to so many tokens. What is there they hold first, lest it make room for others."""
        missing: list[MediaItem] = []
        for row, end in chunks:
            while row.num_taken < len(row.items) and (item := row.items[row.num_taken]).offset < end:
                row.num_taken += 1
                if item.key in self._kept:
                    self._hold(item)
                else:
                    missing.append(item)
        for item in missing:
            if item.key not in self._kept:
                self._make(item)
            self._hold(item)

    def _hold(self, item: MediaItem) -> None:
        entry = self._kept[item.key]
        if not entry.num_users:
            self.num_held += entry.num_vectors
            self._idle.pop(item.key, None)
        entry.num_users += 1

    def _make(self, item: MediaItem) -> None:
        num_vectors = item.num_vectors
        while self._idle and self.num_kept + num_vectors > self.size:
            self._forget(next(iter(self._idle)))
        self._kept[item.key] = _Entry(num_vectors)
        self.num_kept += num_vectors
        self.num_made += num_vectors
        self._encodes.append(self.shelf.filled(item))

    def _forget(self, key: bytes) -> None:
        del self._idle[key]
        self.num_kept -= self._kept.pop(key).num_vectors
        self._forgotten.append(key)

    def tell(self) -> tuple[list[bytes], list[MediaItem]]:
        """What the worker forgets and encodes in the step that was planned."""
        told, self._forgotten, self._encodes = (self._forgotten, self._encodes), [], []
        self.num_made = 0
        return told

    def reset(self) -> bool:
        """Forget what nobody holds; whether that is all."""
        for key in list(self._idle):
            self._forget(key)
        return not self._kept

    def forget_all(self, unheard: Iterable[bytes] = ()) -> None:
        """Nobody knows what the worker has; it may not have heard of some that it was to forget. All rows
        are about to leave."""
        self._forgotten = list(dict.fromkeys([*self._forgotten, *unheard, *self._kept]))
        self._kept, self._idle, self._encodes, self.rows = {}, {}, [], {}
        self.num_held = self.num_kept = self.num_made = 0


def _num_before(items: list[MediaItem], position: int) -> int:
    """How many items end at a position or before."""
    return next((n for n, item in enumerate(items) if item.end > position), len(items))
