"""Copies of KV cache entries between the device and the lower tiers, host memory and disk.

An entry is a KV block, or a checkpoint of SSM states. Its key has a mark if it is a checkpoint."""

from collections.abc import Sequence

import msgspec

from quire.data.block_hash import DIGEST_BYTES
from quire.data.kv_transfer import RemotePrefix, TargetMemory

STATE_MARK = b"state"
"""Suffix that distinguishes the keys of SSM state checkpoints from the keys of KV blocks."""
ON_DISK, REMOTE = 0, -1
"""Numbers in place of a host slot, for an entry that is loaded from disk, or from another engine."""


def is_state(key: bytes) -> bool:
    """Whether a key belongs to a checkpoint of SSM states; the keys of KV blocks have shorter suffixes."""
    return key.endswith(STATE_MARK, DIGEST_BYTES)


class BlockStores(msgspec.Struct, omit_defaults=True):
    """KV cache entries (blocks or SSM state checkpoints) to copy to lower tiers. A step copies them before it
    computes, since it may overwrite them. The last `num_ahead` entries may be copied later."""

    ids: list[int] = []
    """Number of each block, or slot of each checkpoint on the device."""
    keys: list[bytes] = []
    slots: list[int] = []
    """Host slot of each entry; 0 if the entry is not copied to host memory."""
    to_disk: list[bool] = []
    """Whether each entry is written to disk."""
    dropped: list[bytes] = []
    """Keys of files to delete first."""
    num_ahead: int = 0
    """Number of entries at the end that this step does not overwrite: they may be copied while it runs, but
    before the next step."""

    def part(self, places: Sequence[int]) -> "BlockStores":
        """Return the entries at these indices, without `dropped` and `num_ahead`."""
        return BlockStores(
            ids=[self.ids[at] for at in places],
            keys=[self.keys[at] for at in places],
            slots=[self.slots[at] for at in places],
            to_disk=[self.to_disk[at] for at in places],
        )


class BlockLoad(msgspec.Struct):
    """KV cache entries to copy from lower tiers or another engine to the device, while steps run."""

    ids: list[int]
    slots: list[int]
    """Host slot of each entry, ON_DISK or REMOTE."""
    keys: list[bytes]
    remote: RemotePrefix | None = None
    """Prefix in another engine, to which the entries with the slot REMOTE belong. The other engine releases
    it after the load."""


class BlockRead(msgspec.Struct):
    """KV cache entries of one rank to copy for the same rank of another engine."""

    rank: int
    ids: list[int]
    are_states: bool
    """Whether the entries are checkpoints of SSM states."""
    target: TargetMemory | None = None
    """Memory of the other engine to write to; None: the result has the bytes."""


class LoadDone(msgspec.Struct):
    """Result of a `BlockLoad`, and times of the copies to lower tiers since the last result."""

    failed: list[int] = []
    """Indices of the entries that could not be read; their contents on the device are undefined."""
    seconds: float = 0.0
    is_off: bool = False
    """Whether the disk tier is off after an error."""
    store_s: float = 0.0
    """Seconds of copies from the device to host memory."""
    read_s: float = 0.0
    """Seconds of reading files."""
    write_s: float = 0.0
    """Seconds of writing files."""
    written_bytes: int = 0
    lost_writes: list[bytes] = []
    """Keys of entries that were not written to disk: too many were waiting, or the disk failed."""
    remote_problem: str = ""
    """Reason for which the prefix in another engine could not be loaded or released; empty without one."""

    @classmethod
    def merged(cls, ranks: Sequence["LoadDone"]) -> "LoadDone":
        """Return the result of all ranks: an entry failed if it failed on any rank. Times are the longest of
        a rank, since the ranks copy at the same time."""
        seconds = {
            name: max(getattr(rank, name) for rank in ranks)
            for name in ("seconds", "store_s", "read_s", "write_s")
        }
        return cls(
            failed=sorted({place for rank in ranks for place in rank.failed}),
            is_off=any(rank.is_off for rank in ranks),
            written_bytes=sum(rank.written_bytes for rank in ranks),
            lost_writes=sorted({key for rank in ranks for key in rank.lost_writes}),
            remote_problem=next((rank.remote_problem for rank in ranks if rank.remote_problem), ""),
            **seconds,
        )
