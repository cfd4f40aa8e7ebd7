"""The lower tiers of a worker: copies of KV cache blocks to host memory and disk, and back.

A block is one row of bytes there: its pages of all layers, one after another."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
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
"""Most blocks that are read from disk before they are copied to the device."""


class CachePages:
    """The pages of a cache, by block: tensors [num_blocks, ...] of all layers."""

    def __init__(self, layers: Iterable[Caching]) -> None:
        tensors: dict[tuple[object, ...], Tensor] = {}
        for tensor in (tensor for layer in layers for tensor in _caches(layer)):
            pages = tensor.view(torch.uint8)
            # Layers of different groups share memory: a block belongs to one group.
            tensors[pages.data_ptr(), pages.shape, pages.stride()] = pages
        self.tensors = _merged(list(tensors.values()))
        self.block_bytes = sum(pages[0].numel() for pages in self.tensors)
        self.num_blocks = len(self.tensors[0]) if self.tensors else 0

    @torch.inference_mode()
    def gather(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the contents of blocks [n, block_bytes], in `out` if it is there."""
        if out is None:
            out = torch.empty((len(ids), self.block_bytes), dtype=torch.uint8, device=ids.device)
        for pages, part in self._parts(out):
            torch.index_select(pages, 0, ids, out=part)
        return out

    @torch.inference_mode()
    def scatter(self, ids: Tensor, contents: Tensor) -> None:
        """Set the contents of blocks."""
        for pages, part in self._parts(contents):
            pages.index_copy_(0, ids, part)

    def _parts(self, contents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each tensor with its part of `contents`, both as numbers as wide as possible."""
        first = 0
        for pages in self.tensors:
            size = pages[0].numel()
            part = contents[:, first : first + size].view(len(contents), *pages.shape[1:])
            wide = torch.int64 if _is_wide(pages) and _is_wide(part) else torch.uint8
            yield pages.view(wide), part.view(wide)
            first += size


def _is_wide(rows: Tensor) -> bool:
    """Whether bytes can be read as numbers of 8 bytes."""
    sizes = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    return rows.stride(-1) == 1 and rows.data_ptr() % 8 == 0 and not any(size % 8 for size in sizes)


def _merged(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors with runs of equal ones at equal distances in memory as one [num_blocks, n, size],
    so that a copy takes few kernels."""
    merged: list[Tensor] = []
    runs: list[list[Tensor]] = []
    for pages in sorted(tensors, key=Tensor.data_ptr):
        if not pages.is_contiguous():
            merged.append(pages)
        elif runs and _continues(runs[-1], pages):
            runs[-1].append(pages)
        else:
            runs.append([pages])
    for run in runs:
        num_blocks, size = len(run[0]), run[0][0].numel()
        distance = run[1].data_ptr() - run[0].data_ptr() if len(run) > 1 else 0
        merged.append(run[0].as_strided((num_blocks, len(run), size), (size, distance, 1)))
    return merged


def _continues(run: list[Tensor], pages: Tensor) -> bool:
    first, last = run[0], run[-1]
    if first.untyped_storage().data_ptr() != pages.untyped_storage().data_ptr():
        return False
    distance = pages.data_ptr() - last.data_ptr()
    is_same = len(pages) == len(first) and pages.numel() == first.numel()
    return is_same and (len(run) == 1 or distance == run[1].data_ptr() - first.data_ptr())


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

    def begin_step(self) -> None:
        """Order the next step after the copies to the host that were started with `ahead`."""

    def start_out(
        self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int], *, keep: bool, ahead: bool
    ) -> "CopiedBlocks | None":
        """Start to copy blocks to the host, in the order of the steps: those with `rows[i] > 0` to that row
        of `slots`, and with `keep` all of them to memory that is returned. With `ahead`, the next step may
        run meanwhile: it does not overwrite them."""

    def begin_in(self) -> None:
        """Order the next copies to the cache after the steps that were submitted."""

    def start_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        """Start to copy blocks to the cache; may run in any thread."""

    def wait_in(self) -> None:
        """Wait for the copies to the cache that were started."""


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

    def begin_step(self) -> None:
        """Return: the copies are done when they have been started."""

    def start_out(
        self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int], *, keep: bool, ahead: bool
    ) -> CopiedBlocks | None:
        contents = self.pages.gather(torch.tensor(ids))
        if slots is not None:
            slots[torch.tensor(rows)] = contents  # row 0 takes those without a slot
        return HostBlocks(contents) if keep else None

    def begin_in(self) -> None:
        """Return: steps are done when they have been submitted."""

    def start_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        rows = [torch.as_tensor(part) for part in contents]
        self.pages.scatter(torch.tensor(ids), torch.stack(rows))

    def wait_in(self) -> None:
        """Return: the copies are done when they have been started."""


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
        num_now = len(stores.block_ids) - stores.num_ahead
        self._store(stores, slice(0, num_now), ahead=False)
        self._store(stores, slice(num_now, None), ahead=True)

    def _store(self, stores: BlockStores, part: slice, *, ahead: bool) -> None:
        ids, rows, files = stores.block_ids[part], stores.slots[part], stores.files[part]
        if not ids:
            return
        to_disk = self.disk is not None and any(files)
        out = self.copies.start_out(ids, self.slots, rows, keep=to_disk, ahead=ahead)
        if self.disk is not None and out is not None:
            self.disk.write(files, out)

    def begin_step(self) -> None:
        """Order the next step after the copies of blocks that it may overwrite."""
        self.copies.begin_step()

    def load(self, load: BlockLoad) -> LoadDone:
        """Copy blocks to the cache; those that cannot be read are left out."""
        began, failed = time.monotonic(), list[int]()
        with self._entering:
            self.copies.begin_in()
        for first in range(0, len(load.keys), _AT_ONCE):
            places = range(first, min(first + _AT_ONCE, len(load.keys)))
            contents = self._read(load, places)
            failed += [place for place in places if place not in contents]
            if contents:
                with self._entering:
                    self.copies.start_in([load.block_ids[at] for at in contents], [*contents.values()])
        self.copies.wait_in()
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
            self.copies.wait_in()
            self.copies = copies

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
