"""Copies of KV cache blocks between the device and the lower tiers, host memory and disk."""

import msgspec


class BlockStores(msgspec.Struct, omit_defaults=True):
    """Blocks to copy to lower tiers. A step copies them before it computes, so that it may overwrite them,
    except the last `num_ahead` blocks."""

    block_ids: list[int] = []
    slots: list[int] = []
    """Host slot of each block; 0: it is not copied to host memory."""
    files: list[bytes] = []
    """Key of each block under which it is written to disk; empty: it is not written."""
    dropped: list[bytes] = []
    """Keys of files to delete first."""
    num_ahead: int = 0
    """Number of blocks at the end that this step does not overwrite: they may be copied while it runs, and
    before the next one."""


class BlockLoad(msgspec.Struct):
    """Blocks to copy from lower tiers to the device, beside the steps."""

    block_ids: list[int]
    slots: list[int]
    """Host slot of each block; 0: it is read from disk."""
    keys: list[bytes]


class LoadDone(msgspec.Struct):
    """Result of a `BlockLoad`."""

    failed: list[int] = []
    """Places of the blocks that could not be read; their contents are undefined."""
    seconds: float = 0.0
    is_off: bool = False
    """Whether the disk tier is off after an error."""
