"""CachedPrefixes: which prefixes an engine core has cached, as keys of a router, from its KV events."""

from collections import deque
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from quire.frontend.prefix_map import Keys, PrefixKeys

LOG_LENGTH = 1 << 16
"""Number of past changes that are kept for readers. A reader that has missed more changes gets all keys
instead."""
MAX_FORGOTTEN = 1 << 15
"""Maximum number of blocks that are remembered although they are no longer cached."""
_decode = msgspec.msgpack.Decoder().decode


class PrefixChanges(NamedTuple):
    """The answer to a reader that has seen the first n changes of a cache: the prefixes that have entered and
    left the cache since then."""

    number: int
    """Number of changes up to now, from which the next call continues."""
    stored: bytes = b""
    """Keys (64 bits each) of prefixes that are cached now."""
    removed: bytes = b""

    @property
    def stored_keys(self) -> Keys:
        return np.frombuffer(self.stored, np.uint64)

    @property
    def removed_keys(self) -> Keys:
        return np.frombuffer(self.removed, np.uint64)


class _Block(NamedTuple):
    """A cached block, which stands for the prefix that ends with it."""

    num_blocks: int
    total: int
    """Hash state of the tokens up to the end of the block, from which those of later blocks follow."""
    salt: str | None
    key: int | None
    """The router's key of the prefix; None if routers do not look up prefixes of this length."""


class CachedPrefixes:
    """The prefixes in the cache of one engine core, in all of its tiers, and a log of their changes. Prompts
    of LoRA adapters, and prompts with media or embeddings, are left out."""

    def __init__(self, block_size: int) -> None:
        self._keys = PrefixKeys(block_size)
        self._blocks: dict[int | bytes, _Block] = {}
        """Blocks that are cached, or were a while ago: a copy in a lower tier may be reported after the
        original has left the device, and by its hash alone. By the hash that the events have."""
        self._media: dict[int | bytes, set[str]] = {}
        """Media (GPU, CPU, STORAGE) of each cached block."""
        self._log: deque[tuple[int, bool]] = deque(maxlen=LOG_LENGTH)
        """Keys that were stored (True) or removed (False), in order."""
        self._number = 0

    def since(self, number: int) -> PrefixChanges:
        """Return the changes after the first `number` changes; all keys if those are not known any more."""
        num_new = self._number - number
        if not 0 <= num_new <= len(self._log) or not number:
            blocks = (self._blocks[hash] for hash in self._media)
            changed = {block.key: True for block in blocks if block.key is not None}
        else:
            changed = dict(islice(self._log, len(self._log) - num_new, None))
        stored, removed = (
            [key for key, is_in in changed.items() if is_in is state] for state in (True, False)
        )
        as_bytes = (np.array(keys, np.uint64).tobytes() for keys in (stored, removed))
        return PrefixChanges(self._number, *as_bytes)

    def apply(self, payload: bytes) -> None:
        """Apply a batch of events: [time, events, data-parallel rank], each event as a map."""
        for event in _decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.clear()
            elif event["group_idx"] == 0:  # the first group of layers stands for all
                is_stored = event["type"] == "BlockStored"
                (self._store if is_stored else self._remove)(event)

    def clear(self) -> None:
        """Forget all prefixes, after a reset or if events were missed."""
        for hash in self._media:
            self._note(self._blocks[hash], is_stored=False)
        self._media.clear()

    def _store(self, event: dict[str, Any]) -> None:
        hashes, medium = event["block_hashes"], event["medium"]
        for hash in hashes:
            if hash in self._blocks:
                self._add(hash, medium)
        if not event["token_ids"] or event["lora_name"] is not None:
            return
        extra_keys = event.get("extra_keys") or [None] * len(hashes)
        last = self._blocks.get(event["parent_block_hash"])
        if event["parent_block_hash"] is None:
            salts = [key for key in extra_keys[0] or () if isinstance(key, str)]
            last = _Block(0, 0, salts[0] if salts else None, None)
        elif last is None:
            return
        totals = self._keys.totals(event["token_ids"], last.num_blocks, last.total)
        for hash, total, keys in zip(hashes, totals, extra_keys, strict=True):
            if any(not isinstance(key, str) for key in keys or ()):
                return
            num_blocks = last.num_blocks + 1
            key = self._keys.key(total, last.salt) if self._keys.is_looked_up(num_blocks) else None
            last = _Block(num_blocks, total, last.salt, key)
            if hash not in self._blocks:
                self._blocks[hash] = last
                self._add(hash, medium)

    def _add(self, hash: int | bytes, medium: str) -> None:
        if hash not in self._media:
            self._media[hash] = set()
            self._note(self._blocks[hash], is_stored=True)
        self._media[hash].add(medium)

    def _remove(self, event: dict[str, Any]) -> None:
        for hash in event["block_hashes"]:
            media = self._media.get(hash)
            if media is None:
                continue
            media.discard(event["medium"])
            if not media:
                del self._media[hash]
                self._note(self._blocks[hash], is_stored=False)
        if len(self._blocks) > len(self._media) + MAX_FORGOTTEN:
            self._blocks = {hash: self._blocks[hash] for hash in self._media}

    def _note(self, block: _Block, *, is_stored: bool) -> None:
        if block.key is not None:
            self._log.append((block.key, is_stored))
            self._number += 1


async def follow_events(endpoint: str, prefixes: CachedPrefixes) -> None:
    """Apply the KV events that an engine core publishes at an endpoint, until the task is cancelled."""
    next_number = 0
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.LINGER, 0)
        events.set_hwm(0)
        events.subscribe(b"")
        events.connect(endpoint)
        while True:
            _, number, payload = await events.recv_multipart()
            if int.from_bytes(number, "big") != next_number:  # batches were dropped
                prefixes.clear()
            next_number = int.from_bytes(number, "big") + 1
            prefixes.apply(payload)
