"""MissReasons: explains why the prefix cache held no more tokens of a prompt."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from quire.data.cache_scope import split_salt
from quire.data.kv_tiers import STATE_MARK
from quire.data.prefix_miss import PrefixMiss
from quire.data.request import Request
from quire.data.step_plan import Ints

MIN_ENTRIES, MAX_ENTRIES = 1 << 10, 1 << 15
"""Bounds of the number of blocks that are remembered; between them, as many as the cache has. A block takes
about 500 bytes of host memory."""

K = TypeVar("K")
V = TypeVar("V")


class RecentEntries(Generic[K, V]):
    """A mapping that forgets old entries. It has at least the last `limit` entries, and at most twice as many
    plus those of one update."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def update(self, entries: Mapping[K, V]) -> None:
        self._new.update(entries)
        if len(self._new) > self._limit:
            self._old, self._new = self._new, {}

    def get(self, key: K) -> V | None:
        value = self._new.get(key)
        return self._old.get(key) if value is None else value

    def clear(self) -> None:
        self._new, self._old = {}, {}


class MissReasons:
    """Remembers which blocks were evicted and how known prompts continued, to explain why a prompt was not in
    the prefix cache.

    A reason reveals nothing about prompts of other cache scopes or salts. The tokens after a prefix are found
    by the key of the prefix, which contains scope and salt; equal first blocks are searched in the same
    scope. Salted prompts without a named API key are never found by others. Without scope and salt, prompts
    may be of different clients: then a difference is reported by block, as the number of cached tokens is.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        root_key: Callable[[Request], bytes],
        marks: Sequence[bytes],
        unit: int | None = None,
        off_reason: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without any records. `root_key` returns the key before the first block of a request; `marks`
        are the suffixes of the keys of pages, by layer group; `unit` is the distance in tokens between
        checkpoints of SSM states; `off_reason` is the reason for which prefix caching is off."""
        self.block_size, self.unit = block_size, unit or block_size
        self.off_reason = off_reason
        self._root_key, self._marks, self._clock = root_key, marks, clock
        limit = min(max(num_blocks, MIN_ENTRIES), MAX_ENTRIES)
        self._evicted: RecentEntries[bytes, tuple[float, str]] = RecentEntries(limit)
        """Time of the last eviction of each block, and the tier that it was evicted from, by key."""
        self._continuations: RecentEntries[bytes, tuple[int, Ints]] = RecentEntries(limit)
        """By key of a prefix: the last prompt that continued it, as the number of one of its blocks (at most
        that of the block after the prefix) and its tokens from that block on. The keys of all blocks with
        these tokens are added together, so the tokens are forgotten together with them."""
        self._first_blocks: RecentEntries[tuple[str, bytes], tuple[str | None, str]] = RecentEntries(limit)
        """By cache scope and tokens of a first block: salt and LoRA adapter of the last prompt that began
        with it."""

    def evicted(self, keys: Sequence[bytes], tier: str = "device") -> None:
        """Record that blocks were evicted from a tier: `device`, `host` or `disk`."""
        self._evicted.update(dict.fromkeys(keys, (self._clock(), tier)))

    def forget(self) -> None:
        """Forget everything; the cache was reset."""
        for entries in (self._evicted, self._continuations, self._first_blocks):
            entries.clear()

    def learn(self, request: Request, tokens: Ints, first: int, end: int) -> None:
        """Record the full blocks number `first` to `end` of a request that leaves its row, as the known
        continuation of their prefixes; `tokens` are all tokens of the request."""
        if first >= end:
            return
        keys, size = request.block_keys, self.block_size
        continuation = first, tokens[first * size : end * size].copy()
        parents = keys[first - 1 : end - 1] if first else [self._root_key(request), *keys[: end - 1]]
        self._continuations.update(dict.fromkeys(parents, continuation))
        if first == 0:
            scope, salt = split_salt(request.cache_salt)
            if scope or salt is None:
                self._first_blocks.update(
                    {(scope, continuation[1][:size].tobytes()): (salt, _adapter_of(request))}
                )

    def explain(self, request: Request, num_cached: int, num_seen: int) -> PrefixMiss | None:
        """Return why a request that runs for the first time has only `num_cached` tokens of its prompt in the
        cache; None if no more was possible. The KV pages of `num_seen` tokens are cached, more than
        `num_cached` if a checkpoint of SSM states is missing."""
        if self.off_reason:
            return PrefixMiss("off", why=self.off_reason)
        if request.params.skip_reading_prefix_cache:
            return PrefixMiss("skipped")
        num_usable = (request.prompt_len - 1) // self.unit * self.unit
        if num_usable == 0:
            return PrefixMiss("too_short")
        if num_cached >= num_usable:
            return None
        first, num_seen = num_cached // self.block_size, max(num_seen, num_cached)
        keys = request.block_keys[first : max(num_seen // self.block_size, first + 1)]
        suffixes = self._marks if num_seen == num_cached else (STATE_MARK,)
        for key in keys:
            for suffix in suffixes:
                if (eviction := self._evicted.get(key + suffix)) is not None:
                    evicted_at, tier = eviction
                    seconds = round(self._clock() - evicted_at, 3)
                    return PrefixMiss("evicted", num_cached, evicted_s=seconds, tier=tier)
        if num_seen > num_cached:
            return PrefixMiss("no_checkpoint", num_cached)
        return self._compare(request, first) or PrefixMiss("never_seen", num_cached)

    def _compare(self, request: Request, at: int) -> PrefixMiss | None:
        """Compare block `at` of a request with the block that followed the same prefix before. Return the
        reason for the miss, or None if there is no such block."""
        size = self.block_size
        start, tokens = at * size, np.array(request.tokens[at * size : (at + 1) * size], np.int32)
        continuation = self._continuations.get(request.block_keys[at - 1] if at else self._root_key(request))
        if continuation is not None:
            known = continuation[1][(at - continuation[0]) * size : (at - continuation[0] + 1) * size]
            differences = np.flatnonzero(known != tokens)
            num_same = int(differences[0]) if len(differences) else size
            if _is_media(request, start, num_same, size):
                return PrefixMiss("other_media", start)
            is_exact = request.cache_salt is not None
            if num_same < size and (at or (is_exact and num_same >= size // 2)):
                return PrefixMiss("differs", start + num_same if is_exact else start)
        return None if at else self._other_root(request, tokens.tobytes())

    def _other_root(self, request: Request, tokens: bytes) -> PrefixMiss | None:
        """Return the reason if the last prompt with these first tokens had another salt or adapter, else
        None."""
        scope, salt = split_salt(request.cache_salt)
        if (known := self._first_blocks.get((scope, tokens))) is None:
            return None
        if known[0] != salt:
            return PrefixMiss("other_salt")
        return PrefixMiss("other_adapter") if known[1] != _adapter_of(request) else None


def _adapter_of(request: Request) -> str:
    return "" if request.lora is None else request.lora.lora_name


def _is_media(request: Request, start: int, num_same: int, size: int) -> bool:
    """Whether a block that has `num_same` tokens in common with another block differs in its media."""
    if request.embeds is not None:
        return True
    if request.media is None:
        return False
    at = start + num_same
    if num_same == size:
        return bool(request.media.keys_of(start, at))
    return any(item.offset <= at < item.end for item in request.media.items)
