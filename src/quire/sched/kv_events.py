"""KVEvents: collects the changes of the prefix cache for subscribers."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from quire.data.block_hash import DIGEST_BYTES, ExtraKey
from quire.data.kv_events import DEVICE, NO_TOKENS, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.data.params import REPORT_MODE
from quire.data.request import Request
from quire.data.step_plan import Ints
from quire.sched.blocks import SALTED, Block
from quire.sched.tier_index import TierIndex

Tokens = Sequence[int] | Ints


class EventSink(Protocol):
    """Receives batches of events; it never blocks."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue a batch of events to be sent; do not wait."""

    def take_dropped(self) -> int:
        """Return the number of batches that were dropped since the last call."""

    def close(self) -> None:
        """Stop sending events."""


class GroupKind(NamedTuple):
    """The kind of a layer group, as KV events name it, and its sliding window in tokens (None: no window)."""

    name: str
    window: int | None = None


class KVEvents:
    """Collects KV cache events and publishes them in batches. Blocks are reported as stored when the step
    that fills them is planned, and as removed when requests cannot find them any more."""

    def __init__(self, sink: EventSink, *, block_size: int, kinds: Sequence[GroupKind | None]) -> None:
        """Build the collector. `kinds` describes each group of layers; a group of SSM states comes last.
        None: the blocks of the group are empty and are not reported."""
        self._sink = sink
        self._block_size = block_size
        self._kinds = kinds
        self._events: list[KVEvent] = []
        self._tiers: list[tuple[TierIndex, str]] = []

    def watch(self, tier: TierIndex, medium: str) -> None:
        """Report the changes of a lower tier."""
        self._tiers.append((tier, medium))
        tier.on_stored = partial(self._copied, medium=medium)
        tier.on_removed = partial(self.removed, medium=medium)

    def flush(self) -> None:
        """Publish the events since the last call as one batch."""
        if self._events:
            events, self._events = self._events, []
            self._sink.publish(events)

    def take_dropped(self) -> int:
        return self._sink.take_dropped()

    def close(self) -> None:
        self.flush()
        self._sink.close()

    # ---- the device

    def stored(self, request: Request, tokens: Tokens, group: int, places: Sequence[int]) -> None:
        """Report blocks of a request that are on the device. `places` are block numbers in its tokens. Each
        run of consecutive blocks is one event."""
        begin = 0
        for at in range(1, len(places) + 1):
            if at == len(places) or places[at] != places[at - 1] + 1:
                self._store_run(request, tokens, group, places[begin], places[at - 1] + 1)
                begin = at

    def _store_run(self, request: Request, tokens: Tokens, group: int, first: int, end: int) -> None:
        if (kind := self._kinds[group]) is None:
            return
        keys, lora, size = request.block_keys, request.lora, self._block_size
        extra_keys = [_extra_keys(request, at, size) for at in range(first, end)]
        self._events.append(
            BlockStored(
                block_hashes=keys[first:end],
                parent_block_hash=keys[first - 1] if first else None,
                token_ids=np.array(tokens[first * size : end * size], np.int32),
                block_size=size,
                lora_id=None if lora is None else lora.lora_int_id,
                medium=DEVICE,
                lora_name=None if lora is None else lora.lora_name,
                extra_keys=extra_keys if any(extra_keys) else None,
                group_idx=group,
                kv_cache_spec_kind=kind.name,
                kv_cache_spec_sliding_window=kind.window,
                lora_digest=None if lora is None else request.adapter_digest.hex(),
            )
        )

    def indexed(
        self, request: Request, tokens: Tokens, tables: Iterable[Sequence[Block | None]], places: range
    ) -> None:
        """Report blocks of a row that are now in the index. Blocks without a key are not reported: other
        rows have indexed equal blocks before."""
        for group, table in enumerate(tables):
            stored = [at for at in places if (block := table[at]) is not None and block.key is not None]
            self.stored(request, tokens, group, stored)

    def loaded(self, request: Request, places: Iterable[int], blocks: Iterable[Block]) -> None:
        """Report blocks of a request that were copied to the device. `places` are their block numbers in the
        prompt. Blocks without a key are not reported: they are not in the index."""
        by_group: dict[int, list[int]] = {}
        for place, block in zip(places, blocks, strict=True):
            if block.key is not None:
                by_group.setdefault(self._group_of(block.key), []).append(place)
        for group, stored in by_group.items():
            self.stored(request, request.tokens, group, stored)

    def reused(self, request: Request, tables: Sequence[Sequence[Block | None]], state: int = 0) -> None:
        """Report the cached blocks of an admitted request again if the request asks for it, and the SSM
        states after its first `state` blocks."""
        if (request.params.extra_args or {}).get(REPORT_MODE) != "full":
            return
        for group, table in enumerate(tables):
            reused = [place for place, block in enumerate(table) if block is not None]
            self.stored(request, request.tokens, group, reused)
        if state:
            self.stored(request, request.tokens, len(tables), [state - 1])

    # ---- all media

    def _copied(self, key: bytes, medium: str) -> None:
        """Report that a block was copied to a lower tier. The event has its hash alone, since its tokens were
        reported before."""
        group = self._group_of(key)
        if (kind := self._kinds[group]) is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and (last.medium, last.group_idx) == (medium, group):
            last.block_hashes.append(key)
            return
        self._events.append(
            BlockStored(
                block_hashes=[key],
                parent_block_hash=None,
                token_ids=NO_TOKENS,
                block_size=0,
                lora_id=None,
                medium=medium,
                lora_name=None,
                group_idx=group,
                kv_cache_spec_kind=kind.name,
                kv_cache_spec_sliding_window=kind.window,
            )
        )

    def removed(self, key: bytes, medium: str = DEVICE) -> None:
        """Report that a block has left a medium."""
        group, last = self._group_of(key), self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group):
            last.block_hashes.append(key)
        elif self._kinds[group] is not None:
            self._events.append(BlockRemoved([key], medium, group))

    def forgotten(self, blocks: Iterable[Block]) -> None:
        """Report blocks that are about to leave the index of the device, if they are in it."""
        for block in blocks:
            if block.key is not None:
                self.removed(block.key)

    def cleared(self) -> None:
        """Report that all blocks are gone, then those that lower tiers still have."""
        self._events = [AllBlocksCleared()]
        for tier, medium in self._tiers:
            for key in tier:
                self._copied(key, medium)

    def _group_of(self, key: bytes) -> int:
        """Return the index of the layer group that the block with this key belongs to."""
        mark = key[DIGEST_BYTES:].removeprefix(SALTED)
        if not mark:
            return 0
        return mark[0] if len(mark) == 1 else len(self._kinds) - 1


def _extra_keys(request: Request, place: int, size: int) -> list[ExtraKey] | None:
    """Return what the hash of a block depends on beside its tokens (such as LoRA adapter, media and salt), in
    vLLM's order."""
    keys: list[ExtraKey] = [] if request.lora is None else [request.lora.lora_name]
    start, end = place * size, (place + 1) * size
    if request.media is not None:
        keys += request.media.extra_keys_of(start, end)
    if request.cache_salt is not None and place == 0:
        keys.append(request.cache_salt)
    if request.embeds is not None and (vectors := request.embeds.keys_of(start, end)):
        keys.append(vectors)
    return keys or None
