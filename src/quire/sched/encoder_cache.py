"""Encoder cache: decides in which step each multimodal item is encoded and how long its vectors are kept."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from quire.data.multimodal import Arrays, Media, MediaItem
from quire.data.request import Request
from quire.data.step_plan import Ints
from quire.sched.limits import StepLimits
from quire.sched.running import Running


class ArrayStore:
    """Stores the arrays (encoder inputs) of the multimodal items of all current requests. Items are stored by
    key, so equal items of several requests take memory once."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, Arrays] = {}
        self._num_users: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._num_users)

    def add(self, media: Media) -> None:
        """Add the items of a request. Arrays that another request has stored under the same key are
        reused."""
        for item in media.items:
            self._num_users[item.key] = self._num_users.get(item.key, 0) + 1
            if item.arrays is not None:
                item.arrays = self._arrays.setdefault(item.key, item.arrays)

    def drop(self, media: Media) -> None:
        """Release the items of a request that has ended."""
        for item in media.items:
            self._num_users[item.key] -= 1
            if not self._num_users[item.key]:
                del self._num_users[item.key]
                self._arrays.pop(item.key, None)

    def with_arrays(self, item: MediaItem) -> MediaItem:
        """Return the item with its arrays, if they are stored."""
        if item.arrays is not None or item.stored is not None:
            return item
        return msgspec.structs.replace(item, arrays=self._arrays.get(item.key))


def strip_arrays(media: Media | None) -> Media | None:
    """Return the media without arrays, as admissions send it to the workers."""
    if media is None:
        return None
    items = [msgspec.structs.replace(item, arrays=None, stored=None) for item in media.items]
    return msgspec.structs.replace(media, items=items)


@dataclass(slots=True)
class _Entry:
    """An item in the cache, with the number of its vectors: the worker has them already, or will have them
    once it runs the step that encodes the item."""

    num_vectors: int
    num_users: int = 0


@dataclass(slots=True)
class _Row:
    """The multimodal items of a row that has not computed all of them yet."""

    items: list[MediaItem]
    num_taken: int
    """Number of leading items whose vectors the row has acquired."""
    num_done: int
    """Number of leading items whose vectors the row has released again."""
    num_bidirectional: int = 0
    """Number of leading prompt tokens that attend to each other in both directions; 0: attention is
    causal."""


@dataclass(slots=True)
class _PlannedUse:
    """Numbers of vectors that rows would hold, and that would be encoded, if a step computed tokens of the
    items considered so far."""

    num_held: int
    num_encoded: int
    keys: set[bytes] = field(default_factory=set)


class EncoderCache:
    """Records which rows (running requests) hold the vectors (encoder outputs) of which items, by key.

    An item is encoded in one piece by the step that first computes one of its tokens. The row holds its
    vectors until the last of these tokens is computed. Vectors that no row holds stay until their space is
    needed; the oldest are evicted first."""

    def __init__(
        self, *, size: int = 0, max_encoded: int | None = None, undivided_items: bool = False
    ) -> None:
        """Build the cache. `size` is the capacity in vectors. It also limits the vectors encoded per step,
        unless `max_encoded` is less. An item that exceeds this limit is encoded alone. With
        `undivided_items`, the tokens of an item are not divided between steps."""
        self.size = size
        self.max_encoded = size if max_encoded is None else max_encoded
        self.undivided_items = undivided_items
        self.arrays = ArrayStore()
        self.rows: dict[int, _Row] = {}
        self.num_held = self.num_kept = self.num_encoded = 0
        """Numbers of vectors: held by rows, kept in the cache, and encoded by the next step."""
        self._entries: dict[bytes, _Entry] = {}
        self._unused: dict[bytes, None] = {}
        """Keys of the vectors that no row holds, oldest first."""
        self._encodes: list[MediaItem] = []
        self._evicted: list[bytes] = []

    # ---- adding and removing requests

    def add(self, request: Request, limits: StepLimits) -> None:
        if (media := request.media) is not None:
            self.arrays.add(media)
            if self.undivided_items:
                limits.require(max((item.length for item in media.items), default=0))
            limits.require(media.num_bidirectional)

    def drop(self, request: Request) -> None:
        if request.media is not None:
            self.arrays.drop(request.media)

    def enter(self, row: int, request: Request, num_computed: int, end: int) -> None:
        """Record that a request with `num_computed` computed tokens gets a row, and that the step being
        planned computes its tokens up to position `end`."""
        if request.media is None:
            return
        items, num_bidirectional = request.media.items, request.media.num_bidirectional
        num_done = _num_before(items, num_computed)
        if num_done < len(items) or num_computed < num_bidirectional:
            entered = self.rows[row] = _Row(items, num_done, num_done, num_bidirectional)
            self._acquire([(entered, end)])

    def leave(self, row: int) -> None:
        if (left := self.rows.pop(row, None)) is not None:
            self._release(left, left.num_taken)

    # ---- chunks

    def cut(self, request: Request, start: int, chunk: int, limits: StepLimits) -> int:
        """Return how many of `chunk` tokens, from position `start` on, a request may compute if it is
        admitted now: only those whose items can be encoded in this step and fit in the cache."""
        if request.media is None or not chunk:
            return chunk
        items = request.media.items
        items = items[_num_before(items, start) :]
        chunk = self._limit_chunk(items, start, chunk, self._planned_use())
        return self._undivided(
            self._undivided_spans(items, request.media.num_bidirectional), start, chunk, limits
        )[0]

    def allow(self, running: Running, pending: Ints, limits: StepLimits) -> Ints:
        """Limit the pending tokens of each row of `running.order` to those before the first item that cannot
        be encoded in this step."""
        if not self.rows:
            return pending
        self._release_computed(running)
        pending, planned = pending.copy(), self._planned_use()
        for place, row in self._places(running):
            row_items = self.rows[row]
            most, start = min(int(pending[place]), limits.max_chunk), int(running.num_computed[row])
            pending[place] = self._limit_chunk(row_items.items[row_items.num_taken :], start, most, planned)
        return pending

    def undivided(self, running: Running, chunks: Ints, limits: StepLimits) -> Ints:
        """Shorten chunks so that none ends inside an item, if items may not be divided. The first row left
        with no tokens gets its whole item, and the last rows wait instead."""
        if not self.rows or not self.undivided_items:
            return chunks
        chunks, first = chunks.copy(), None
        for place, row in self._places(running):
            if not (chunk := int(chunks[place])):
                continue
            held, start = self.rows[row], int(running.num_computed[row])
            spans = self._undivided_spans(held.items[held.num_done :], held.num_bidirectional)
            chunks[place], whole_chunk = self._undivided(spans, start, chunk, limits)
            if not chunks[place] and first is None:
                first, chunks[place] = place, whole_chunk
        if first is None:
            return chunks
        for place in reversed(range(len(chunks))):
            if chunks.sum() > limits.max_tokens and place != first:
                chunks[place] = 0
        return chunks

    def take(self, running: Running, chunks: Ints) -> None:
        """Hold the vectors of the items whose tokens are among the next `chunks` tokens of the rows of
        `running.order`."""
        if self.rows:
            ends = running.num_computed[running.order] + chunks
            self._acquire([(self.rows[row], int(ends[place])) for place, row in self._places(running)])

    def _places(self, running: Running) -> list[tuple[int, int]]:
        """Return (index in `running.order`, row) of each row with items."""
        places = np.flatnonzero(np.isin(running.order, list(self.rows)))
        return list(zip(places.tolist(), running.order[places].tolist(), strict=True))

    def _planned_use(self) -> _PlannedUse:
        return _PlannedUse(self.num_held, self.num_encoded)

    def _limit_chunk(self, items: list[MediaItem], start: int, chunk: int, planned: _PlannedUse) -> int:
        """Return `chunk`, or the number of tokens before the first item that does not fit."""
        for item in items:
            if item.offset >= start + chunk:
                break
            if not self._fits(item, planned):
                return max(item.offset - start, 0)
        return chunk

    def _fits(self, item: MediaItem, planned: _PlannedUse) -> bool:
        entry, num_vectors = self._entries.get(item.key), item.num_vectors
        if item.key in planned.keys or (entry is not None and entry.num_users):
            return True
        num_held, num_encoded = planned.num_held + num_vectors, planned.num_encoded
        if num_held > self.size and planned.num_held:
            return False
        if entry is None:
            num_encoded += num_vectors
            if num_encoded > self.max_encoded and planned.num_encoded:
                return False
        planned.num_held, planned.num_encoded = num_held, num_encoded
        planned.keys.add(item.key)
        return True

    def _undivided_spans(self, items: list[MediaItem], num_bidirectional: int) -> list[tuple[int, int]]:
        """Return the start and end of each span of tokens that one step must compute whole: the items, or the
        first `num_bidirectional` tokens."""
        if num_bidirectional:
            return [(0, num_bidirectional)]
        return [(item.offset, item.end) for item in items] if self.undivided_items else []

    def _undivided(
        self, spans: list[tuple[int, int]], start: int, chunk: int, limits: StepLimits
    ) -> tuple[int, int]:
        """Return two lengths that a chunk may have instead of ending inside a span: the tokens before this
        span, and the tokens up to its end. Both equal the chunk if it ends in no span, or in a span that is
        larger than any step."""
        end = start + chunk
        for first, behind in spans:
            if first < end < behind and behind - max(start, first) <= limits.max_chunk:
                return max(first - start, 0), behind - start
        return chunk, chunk

    # ---- vectors

    def _release_computed(self, running: Running) -> None:
        """Release the vectors of items whose tokens are all computed, also by steps in flight: steps run in
        order."""
        for row, held in list(self.rows.items()):
            self._release(held, _num_before(held.items, int(running.num_computed[row])))
            if held.num_done == len(held.items) and running.num_computed[row] >= held.num_bidirectional:
                del self.rows[row]

    def _release(self, row: _Row, num_done: int) -> None:
        for item in row.items[row.num_done : num_done]:
            entry = self._entries[item.key]
            entry.num_users -= 1
            if not entry.num_users:
                self.num_held -= entry.num_vectors
                self._unused[item.key] = None
        row.num_done = max(row.num_done, num_done)

    def _acquire(self, chunks: list[tuple[_Row, int]]) -> None:
        """Hold the vectors of the items of each row that begin before the given end of its computed tokens.
        Cached items are held first so that encoding the others does not evict them."""
        missing: list[MediaItem] = []
        for row, end in chunks:
            while row.num_taken < len(row.items) and (item := row.items[row.num_taken]).offset < end:
                row.num_taken += 1
                if item.key in self._entries:
                    self._hold(item)
                else:
                    missing.append(item)
        for item in missing:
            if item.key not in self._entries:
                self._encode(item)
            self._hold(item)

    def _hold(self, item: MediaItem) -> None:
        entry = self._entries[item.key]
        if not entry.num_users:
            self.num_held += entry.num_vectors
            self._unused.pop(item.key, None)
        entry.num_users += 1

    def _encode(self, item: MediaItem) -> None:
        num_vectors = item.num_vectors
        while self._unused and self.num_kept + num_vectors > self.size:
            self._evict(next(iter(self._unused)))
        self._entries[item.key] = _Entry(num_vectors)
        self.num_kept += num_vectors
        self.num_encoded += num_vectors
        self._encodes.append(self.arrays.with_arrays(item))

    def _evict(self, key: bytes) -> None:
        del self._unused[key]
        self.num_kept -= self._entries.pop(key).num_vectors
        self._evicted.append(key)

    def take_changes(self) -> tuple[list[bytes], list[MediaItem]]:
        """Return the keys of the items to evict, and the items to encode, in the step that was planned."""
        changes, self._evicted, self._encodes = (self._evicted, self._encodes), [], []
        self.num_encoded = 0
        return changes

    def reset(self) -> bool:
        """Evict the vectors that no row holds; return whether the cache is empty afterwards."""
        for key in list(self._unused):
            self._evict(key)
        return not self._entries

    def forget_all(self, unsent_evictions: Iterable[bytes] = ()) -> None:
        """Forget all vectors because the state of the worker is unknown. `unsent_evictions` are keys of
        evictions that the worker may not have received. The caller releases all rows afterwards."""
        self._evicted = list(dict.fromkeys([*self._evicted, *unsent_evictions, *self._entries]))
        self._entries, self._unused, self._encodes, self.rows = {}, {}, [], {}
        self.num_held = self.num_kept = self.num_encoded = 0


def _num_before(items: list[MediaItem], position: int) -> int:
    """Return the number of items that end at or before a position."""
    return next((n for n, item in enumerate(items) if item.end > position), len(items))
