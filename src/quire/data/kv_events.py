"""KV events: messages about blocks that enter and leave the prefix cache, in vLLM's format."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.block_hash import DIGEST_BYTES, ExtraKey, short_hash

DEVICE, HOST, DISK = "GPU", "CPU", "STORAGE"
"""Media of blocks. `GPU` stands for the device that the model runs on, even if that is a CPU."""
NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class BlockStored(NamedTuple):
    """Consecutive blocks that entered a medium. If `token_ids` is empty, the blocks were copied from another
    medium, and an earlier event reported their tokens."""

    block_hashes: list[bytes]
    """Digests of the blocks; a digest may have a suffix, which is not reported."""
    parent_block_hash: bytes | None
    """Digest of the block before the first of these blocks; None if there is no such block, or if it is not
    reported."""
    token_ids: NDArray[np.int32]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[ExtraKey] | None] | None = None
    """Inputs of each block's hash besides its tokens; None if no block has such inputs."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    lora_digest: str | None = None
    """Digest of the contents of the LoRA adapter, in hexadecimal."""


class BlockRemoved(NamedTuple):
    """Blocks that left a medium."""

    block_hashes: list[bytes]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(NamedTuple):
    """The prefix cache was reset: no block is left in any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_NUM_REQUIRED = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}
"""Number of fields that are sent even if they are None."""


class EventEncoder:
    """Encodes batches of events as msgpack: [time, events, data-parallel rank]. An event is a map with its
    `type`, or an array that begins with the type, as in vLLM before 0.24."""

    def __init__(self, *, rank: int = 0, as_arrays: bool = False, short_hashes: bool = True) -> None:
        self._rank = rank
        self._as_arrays = as_arrays
        self._hash: Callable[[bytes], int | bytes] = short_hash if short_hashes else _digest
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, at: float, events: Sequence[KVEvent]) -> bytes:
        """Return the message of a batch of events at a wall-clock time in seconds."""
        return self._encoder.encode([at, [self._plain(event) for event in events], self._rank])

    def _plain(self, event: KVEvent) -> dict[str, Any] | list[Any]:
        """Return an event as a map or an array."""
        values = event._asdict()
        if not isinstance(event, AllBlocksCleared):
            values["block_hashes"] = [self._hash(digest) for digest in event.block_hashes]
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            values["parent_block_hash"] = None if parent is None else self._hash(parent)
            values["token_ids"] = event.token_ids.tolist()
        kind, required = type(event).__name__, _NUM_REQUIRED[type(event)]
        if self._as_arrays:
            fields = [*values.values()]
            while len(fields) > required and fields[-1] is None:
                fields.pop()
            return [kind, *fields]
        optional = event._fields[required:]
        return {"type": kind} | {
            name: value for name, value in values.items() if value is not None or name not in optional
        }


def _digest(key: bytes) -> bytes:
    return key[:DIGEST_BYTES]
