"""A subscriber's copy of a prefix cache, built from KV events in vLLM's published format."""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.data.block_hash import block_hashes, root_hash, short_hash
from quire.data.kv_events import EventEncoder, KVEvent
from quire.sched.kv_events import GroupKind, KVEvents
from quire.sched.kv_manager import KVManager

KINDS = {
    *("full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba"),
    *("chunked_local_attention", "sink_full_attention", "encoder_only_attention", "cross_attention"),
}


class Mirror:
    """The blocks of a cache by medium, group and hash. The hashes of all events with tokens are computed
    again. It is also a sink, for events without sockets between."""

    def __init__(self) -> None:
        self.blocks: set[tuple[str, int, int]] = set()
        self.digests: dict[int, bytes] = {}
        """Digest of each block by its last 64 bits."""
        self.events: list[dict[str, Any]] = []
        self.num_batches = 0
        self.ranks: set[int] = set()
        self.is_closed = False
        self.num_dropped = 0
        """Number of batches that count as dropped at the next report."""
        self.skips_unknown_parents = False
        self._encoder = EventEncoder()

    def publish(self, events: Sequence[KVEvent]) -> None:
        assert events, "an empty batch"
        self.read(self._encoder.encode(12.5, events))

    def take_dropped(self) -> int:
        count, self.num_dropped = self.num_dropped, 0
        return count

    def close(self) -> None:
        self.is_closed = True

    def read(self, payload: bytes) -> None:
        """Apply a batch: [time, events, data-parallel rank]."""
        at, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(at, float)
        self.num_batches += 1
        self.ranks.add(rank)
        for event in events:
            self.events.append(event)
            getattr(self, f"_{event['type']}")(event)

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:
        assert [*event] == ["type"]
        self.blocks.clear()

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        for hash in event["block_hashes"]:
            entry = event["medium"], event["group_idx"], hash
            assert entry in self.blocks, f"{entry} is removed, and was never stored"
            self.blocks.remove(entry)

    def _BlockStored(self, event: dict[str, Any]) -> None:
        required = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"}
        assert required | {"type", "lora_name", "group_idx", "kv_cache_spec_kind"} <= event.keys()
        assert event["kv_cache_spec_kind"] in KINDS
        if event["medium"] == "GPU":
            self._check_hashes(event)
        else:  # a copy, which is known by its hash
            assert (event["token_ids"], event["block_size"], event["parent_block_hash"]) == ([], 0, None)
        self.blocks |= {(event["medium"], event["group_idx"], hash) for hash in event["block_hashes"]}

    def _check_hashes(self, event: dict[str, Any]) -> None:
        """Compute the hashes of a BlockStored event from its tokens."""
        hashes, parent = event["block_hashes"], event["parent_block_hash"]
        assert len(event["token_ids"]) == len(hashes) * event["block_size"], "not one hash for each block"
        extra_keys = event.get("extra_keys")
        assert extra_keys is None or len(extra_keys) == len(hashes)
        if parent is not None and parent not in self.digests and self.skips_unknown_parents:
            return
        before = self._root(event) if parent is None else self.digests[parent]
        digests = block_hashes(event["token_ids"], event["block_size"], parent=before, extra_keys=extra_keys)
        assert [short_hash(digest) for digest in digests] == hashes
        self.digests.update(zip(hashes, digests, strict=True))

    def _root(self, event: dict[str, Any]) -> bytes:
        texts = [key for key in (event.get("extra_keys") or [[]])[0] or [] if isinstance(key, str)]
        name, digest = event["lora_name"], event.get("lora_digest")
        assert (name is None) == (digest is None) == (event["lora_id"] is None)
        if name is not None:
            assert texts.pop(0) == name
        return root_hash(None if digest is None else bytes.fromhex(digest), *texts)


def follow(kv: KVManager) -> Mirror:
    """Let a new mirror receive the events of a cache."""
    kinds: list[GroupKind | None] = [
        GroupKind("full_attention" if window is None else "sliding_window", window) if kv.has_pages else None
        for window in kv.windows
    ]
    mirror = Mirror()
    mirror.skips_unknown_parents = not kv.has_pages
    kinds += [] if kv.states is None else [GroupKind("mamba")]
    kv.events = KVEvents(mirror, block_size=kv.block_size, kinds=kinds)
    return mirror
