"""The lower tiers of a worker: copies of KV cache blocks to host memory and disk, and back.

A block is one row of bytes there: its pages of all layers, one after another."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.kv_tiers import BlockLoad, BlockStores, LoadDone
from quire.layers.attention import Caching, PagedAttention
from quire.layers.mla import MLAAttention
from quire.worker.disk_tier import DiskTier

_AT_ONCE = 64
"""Most blocks that are copied to the device together; they take memory twice meanwhile."""


class CachePages:
    """The pages of a cache, by block: tensors [num_blocks, ...] of all layers."""

    def __init__(self, layers: Iterable[Caching]) -> None:
        tensors: dict[tuple[object, ...], Tensor] = {}
        for tensor in (tensor for layer in layers for tensor in _caches(layer)):
            pages = tensor.view(torch.uint8)
            # Layers of different groups share memory: a block belongs to one group.
            tensors[pages.data_ptr(), pages.shape, pages.stride()] = pages
        self.tensors = list(tensors.values())
        self.block_bytes = sum(pages[0].numel() for pages in self.tensors)

    @torch.inference_mode()
    def gather(self, ids: Tensor) -> Tensor:
        """Return the contents of blocks [n, block_bytes]."""
        parts = [pages.index_select(0, ids).view(len(ids), -1) for pages in self.tensors]
        return torch.cat(parts, 1)

    @torch.inference_mode()
    def scatter(self, ids: Tensor, contents: Tensor) -> None:
        """Set the contents of blocks."""
        first = 0
        for pages in self.tensors:
            size = pages[0].numel()
            part = contents[:, first : first + size].reshape(len(ids), *pages.shape[1:])
            pages.index_copy_(0, ids, part)
            first += size


def _caches(layer: Caching) -> list[Tensor]:
    """Return the tensors of a layer with one page per block."""
    if isinstance(layer, PagedAttention):
        caches = [layer.k_cache, layer.v_cache]
    elif isinstance(layer, MLAAttention):
        caches = [layer.cache, getattr(layer, "index_keys", None)]
    else:
        raise AssertionError(f"{type(layer).__name__} has no pages")
    return [cache for cache in caches if cache is not None]


class BlockCopies(Protocol):
    """Copies between the cache and host memory."""

    pages: CachePages

    def new_slots(self, count: int) -> Tensor:
        """Return memory for `count` blocks, with one more in front, which is not used."""

    def start_out(self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int]) -> "CopiedBlocks":
        """Start to copy blocks to the host, in the order of the steps. Those with `rows[i] > 0` are also
        copied to that row of `slots`."""

    def copy_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        """Copy blocks to the cache and wait until they are there; may run in any thread."""


class CopiedBlocks(Protocol):
    """Blocks on their way to the host."""

    def wait(self) -> NDArray[np.uint8]:
        """Wait for the copy and return the contents [n, block_bytes]."""


class HostBlocks:
    """Blocks that are in host memory."""

    def __init__(self, contents: Tensor) -> None:
        self._contents = contents

    def wait(self) -> NDArray[np.uint8]:
        return self._contents.numpy()


class CpuBlockCopies:
    """Copies of a cache in host memory."""

    def __init__(self, pages: CachePages) -> None:
        self.pages = pages

    def new_slots(self, count: int) -> Tensor:
        return torch.empty((count + 1, self.pages.block_bytes), dtype=torch.uint8)

    def start_out(self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int]) -> CopiedBlocks:
        contents = self.pages.gather(torch.tensor(ids))
        if slots is not None:
            slots[torch.tensor(rows)] = contents  # row 0 takes those without a slot
        return HostBlocks(contents)

    def copy_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        rows = [torch.as_tensor(part) for part in contents]
        self.pages.scatter(torch.tensor(ids), torch.stack(rows))


class WorkerTiers:
    """Host slots and files of one worker. Stores run in the order of steps, loads in threads beside them."""

    def __init__(self, copies: BlockCopies, num_slots: int, disk: DiskTier | None) -> None:
        self.copies = copies
        self.slots = copies.new_slots(num_slots) if num_slots else None
        self.disk = disk
        self._entering = threading.Lock()
        """Held while a load writes to the cache, and while the cache is replaced."""

    def store(self, stores: BlockStores) -> None:
        """Copy blocks to their host slots and files; files are written later."""
        if self.disk is not None and stores.dropped:
            self.disk.delete(stores.dropped)
        if not stores.block_ids:
            return
        out = self.copies.start_out(stores.block_ids, self.slots, stores.slots)
        if self.disk is not None and any(stores.files):
            self.disk.write(stores.files, out)

    def load(self, load: BlockLoad) -> LoadDone:
        """Copy blocks to the cache; those that cannot be read are left out."""
        began, failed = time.monotonic(), list[int]()
        for first in range(0, len(load.keys), _AT_ONCE):
            places = range(first, min(first + _AT_ONCE, len(load.keys)))
            contents = self._read(load, places)
            failed += [place for place in places if place not in contents]
            if contents:
                with self._entering:
                    self.copies.copy_in([load.block_ids[at] for at in contents], [*contents.values()])
        is_off = self.disk is not None and self.disk.is_off
        return LoadDone(failed, time.monotonic() - began, is_off)

    def _read(self, load: BlockLoad, places: range) -> dict[int, NDArray[np.uint8] | Tensor]:
        """Return the contents of the blocks that can be read, by place."""
        contents: dict[int, NDArray[np.uint8] | Tensor] = {}
        files = [place for place in places if not load.slots[place]]
        if files and self.disk is not None:
            read = self.disk.read([load.keys[place] for place in files])
            contents = {place: data for place, data in zip(files, read, strict=True) if data is not None}
        for place in places:
            if slot := load.slots[place]:
                assert self.slots is not None, "there is no host tier"
                contents[place] = self.slots[slot]
        return dict(sorted(contents.items()))

    def rebind(self, copies: BlockCopies) -> None:
        """Use another cache, of the same layout."""
        with self._entering:
            self.copies = copies

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
