"""Copies of KV cache entries between the device and the lower tiers, host memory and disk.

An entry is a block of pages, or a checkpoint of states. Its key says which."""

from collections.abc import Sequence

import msgspec

from quire.data.block_hash import DIGEST_BYTES
from quire.data.kv_transfer import RemotePrefix

STATE_MARK = b"state"
"""Suffix that distinguishes the keys of checkpoints of states from those of pages."""
ON_DISK, REMOTE = 0, -1
"""Stand for a host slot of an entry that is loaded from disk, or from another engine."""


def is_state(key: bytes) -> bool:
    """Whether a key belongs to a checkpoint of states; the keys of pages have shorter suffixes."""
    return key.endswith(STATE_MARK, DIGEST_BYTES)


class BlockStores(msgspec.Struct, omit_defaults=True):
    """Entries to copy to lower tiers. A step copies them before it computes, so that it may overwrite them,
    except the last `num_ahead` ones."""

    ids: list[int] = []
    """Number of each block, or slot of each checkpoint on the device."""
    keys: list[bytes] = []
    slots: list[int] = []
    """Host slot of each entry; 0: it is not copied to host memory."""
    to_disk: list[bool] = []
    """Whether each entry is written to disk."""
    dropped: list[bytes] = []
    """Keys of files to delete first."""
    num_ahead: int = 0
    """Number of entries at the end that this step does not overwrite: they may be copied while it runs, and
    before the next one."""

    def part(self, places: Sequence[int]) -> "BlockStores":
        """Return the entries at these places."""
        return BlockStores(
            ids=[self.ids[at] for at in places],
            keys=[self.keys[at] for at in places],
            slots=[self.slots[at] for at in places],
            to_disk=[self.to_disk[at] for at in places],
        )


class BlockLoad(msgspec.Struct):
    """Entries to copy from lower tiers to the device, beside the steps."""

    ids: list[int]
    slots: list[int]
    """Host slot of each entry, ON_DISK or REMOTE."""
    keys: list[bytes]
    remote: RemotePrefix | None = None
    """The prefix in another engine that remote entries belong to; it is released there afterwards."""


class LoadDone(msgspec.Struct):
    """Result of a `BlockLoad`, and the copies to lower tiers that have ended since the last one."""

    failed: list[int] = []
    """Places of the entries that could not be read; their contents are undefined."""
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
    remote_problem: str = ""
    """Why the prefix in another engine could not be loaded or released."""

    @classmethod
    def merged(cls, ranks: Sequence["LoadDone"]) -> "LoadDone":
        """Return the result of all ranks: an entry must be there on each of them. They copy at the same
        time."""
        seconds = {
            name: max(getattr(rank, name) for rank in ranks)
            for name in ("seconds", "store_s", "read_s", "write_s")
        }
        return cls(
            failed=sorted({place for rank in ranks for place in rank.failed}),
            is_off=any(rank.is_off for rank in ranks),
            written_bytes=sum(rank.written_bytes for rank in ranks),
            remote_problem=next((rank.remote_problem for rank in ranks if rank.remote_problem), ""),
            **seconds,
        )
