"""The lower tiers of a worker: copies of KV cache entries to host memory and disk, and back.

An entry is a KV block (its pages in all layers), or a checkpoint of the SSM states of all layers. In the
lower tiers it is one row of bytes."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.kv_tiers import ON_DISK, REMOTE, BlockLoad, BlockRead, BlockStores, LoadDone, is_state
from quire.layers.attention import Caching, PagedAttention
from quire.layers.mla import MLAAttention
from quire.layers.ssm import SSMMixer
from quire.system.kv_channel import open_memory
from quire.worker.cuda.ipc import CudaIpc, PeerBuffer
from quire.worker.disk_tier import DiskTier
from quire.worker.remote_tier import RemoteEngines, RemoteRead
from quire.worker.state_checkpoints import StateCheckpoints

_AT_ONCE = 64
"""Most entries that are read from disk before they are copied to the device."""


class CacheEntries:
    """The entries of one kind in the device cache: tensors of all layers, [entries, ...] each. Entry i is at
    index `first` + i of each tensor."""

    def __init__(self, tensors: Iterable[Tensor], first: int = 0) -> None:
        unique: dict[tuple[object, ...], Tensor] = {}
        for rows in (tensor.view(torch.uint8) for tensor in tensors):
            # Layers of different groups share memory: a block belongs to one group.
            unique[rows.data_ptr(), rows.shape, rows.stride()] = rows
        self.tensors = _merged(list(unique.values()))
        self.first = first
        self.entry_bytes = sum(rows[0].numel() for rows in self.tensors)
        self.num_entries = len(self.tensors[0]) - first if self.tensors else 0

    @torch.inference_mode()
    def gather(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the contents [n, entry_bytes] of the entries with these ids, in `out` if it is given."""
        if out is None:
            out = torch.empty((len(ids), self.entry_bytes), dtype=torch.uint8, device=ids.device)
        for rows, part in self._parts(out):
            torch.index_select(rows, 0, ids + self.first, out=part)
        return out

    @torch.inference_mode()
    def scatter(self, ids: Tensor, contents: Tensor) -> None:
        """Set the contents [n, entry_bytes] of the entries with these ids."""
        for rows, part in self._parts(contents):
            rows.index_copy_(0, ids + self.first, part)

    def _parts(self, contents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's tensor of the device cache with its part of `contents`, both viewed as 8-byte
        numbers if they are aligned, for faster copies."""
        first = 0
        for rows in self.tensors:
            size = rows[0].numel()
            part = contents[:, first : first + size].view(len(contents), *rows.shape[1:])
            wide = torch.int64 if _is_aligned(rows) and _is_aligned(part) else torch.uint8
            yield rows.view(wide), part.view(wide)
            first += size


def cache_pages(layers: Iterable[Caching]) -> CacheEntries:
    """Return the KV cache pages of these layers, with one entry per block."""
    paged = (layer for layer in layers if not isinstance(layer, SSMMixer))
    return CacheEntries(tensor for layer in paged for tensor in _caches(layer))


def state_slots(checkpoints: StateCheckpoints) -> CacheEntries:
    """Return the checkpoints of SSM states, with one entry per slot."""
    return CacheEntries((tensor.flatten(1) for tensor in checkpoints.tensors), checkpoints.last)


def _is_aligned(rows: Tensor) -> bool:
    """Whether a tensor of bytes can be viewed as 8-byte numbers."""
    sizes = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    return rows.stride(-1) == 1 and rows.data_ptr() % 8 == 0 and not any(size % 8 for size in sizes)


def _merged(tensors: list[Tensor]) -> list[Tensor]:
    """Merge each run of n tensors of equal size and at equal distances in memory into one tensor
    [num_entries, n, size], so that a copy takes few kernels."""
    merged: list[Tensor] = []
    runs: list[list[Tensor]] = []
    for rows in sorted(tensors, key=Tensor.data_ptr):
        if not rows.is_contiguous():
            merged.append(rows)
        elif runs and _continues(runs[-1], rows):
            runs[-1].append(rows)
        else:
            runs.append([rows])
    for run in runs:
        num_entries, size = len(run[0]), run[0][0].numel()
        distance = run[1].data_ptr() - run[0].data_ptr() if len(run) > 1 else 0
        merged.append(run[0].as_strided((num_entries, len(run), size), (size, distance, 1)))
    return merged


def _continues(run: list[Tensor], rows: Tensor) -> bool:
    first, last = run[0], run[-1]
    if first.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
        return False
    distance = rows.data_ptr() - last.data_ptr()
    is_same = len(rows) == len(first) and rows.numel() == first.numel()
    return is_same and (len(run) == 1 or distance == run[1].data_ptr() - first.data_ptr())


def _caches(layer: Caching) -> list[Tensor]:
    """Return the cache tensors of a layer, each of which has one page per block."""
    if isinstance(layer, PagedAttention):
        caches = [layer.k_cache, layer.v_cache]
    elif isinstance(layer, MLAAttention):
        caches = [layer.cache, getattr(layer, "index_keys", None)]
    else:
        raise AssertionError(f"{type(layer).__name__} has no pages")
    return [cache for cache in caches if cache is not None]


class BlockCopies(Protocol):
    """Copies one kind of KV cache entries between the device and host memory."""

    entries: CacheEntries

    def new_slots(self, count: int) -> Tensor:
        """Allocate host memory [count + 1, entry_bytes] for `count` entries; row 0 stands for no entry."""

    def begin_step(self) -> None:
        """Let the next step wait, on the device, for the copies to the host that `start_out` has started with
        `ahead`: the step may overwrite these entries."""

    def start_out(
        self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int], *, keep: bool, ahead: bool
    ) -> "CopiedBlocks | None":
        """Start to copy the entries `ids` to the host, after the submitted steps, without waiting for the
        copy. Entry i is copied to row `rows[i]` of `slots` if that row is above 0. With `keep`, all entries
        are also copied to memory that is returned, for example to write them to disk. With `ahead`, the next
        step, which does not overwrite these entries, may run during the copy."""

    def read(self, ids: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the contents [n, entry_bytes] of entries that no step writes to, on the host, in `out` if it
        is given; may run in any thread."""

    def write_to(self, buffer: PeerBuffer, ids: Sequence[int]) -> None:
        """Copy entries that no step writes to, one after the other, to the buffer of another engine, and wait
        until they are there; may run in any thread."""

    def begin_in(self) -> None:
        """Let later copies to the device start only after the steps that were submitted so far."""

    def start_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        """Start to copy `contents`, a row of bytes per entry, to the entries `ids`; may run in any thread."""

    def wait_in(self) -> None:
        """Wait on the host until all started copies to the device are done."""

    def take_out_s(self) -> float:
        """Return the total seconds of the copies to the host that have ended since the last call."""


class CopiedBlocks(Protocol):
    """KV cache entries that are being copied to the host."""

    def wait(self) -> NDArray[np.uint8]:
        """Wait for the copy and return the contents [n, entry_bytes]."""


class HostBlocks:
    """KV cache entries that have been copied to host memory."""

    def __init__(self, contents: Tensor) -> None:
        self._contents = contents

    def wait(self) -> NDArray[np.uint8]:
        return self._contents.numpy()


class CpuBlockCopies:
    """Copies KV cache entries on a CPU. A copy is complete when the method that starts it returns."""

    def __init__(self, entries: CacheEntries) -> None:
        self.entries = entries
        self._out_s = 0.0

    def new_slots(self, count: int) -> Tensor:
        return torch.empty((count + 1, self.entries.entry_bytes), dtype=torch.uint8)

    def begin_step(self) -> None:
        """Do nothing: no copy is under way."""

    def start_out(
        self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int], *, keep: bool, ahead: bool
    ) -> CopiedBlocks | None:
        began = time.monotonic()
        contents = self.entries.gather(torch.tensor(ids))
        if slots is not None:
            slots[torch.tensor(rows)] = contents  # entries without a slot are written to row 0
        self._out_s += time.monotonic() - began
        return HostBlocks(contents) if keep else None

    def read(self, ids: Sequence[int], out: Tensor | None = None) -> Tensor:
        return self.entries.gather(torch.tensor(ids), out)

    def write_to(self, buffer: PeerBuffer, ids: Sequence[int]) -> None:
        buffer.write(0, self.read(ids))

    def begin_in(self) -> None:
        """Do nothing: no step is under way."""

    def start_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        rows = [torch.as_tensor(part) for part in contents]
        self.entries.scatter(torch.tensor(ids), torch.stack(rows))

    def wait_in(self) -> None:
        """Do nothing: no copy is under way."""

    def take_out_s(self) -> float:
        seconds, self._out_s = self._out_s, 0.0
        return seconds


class KindTiers:
    """The host tier and the disk tier of one kind of entries: KV blocks, or checkpoints of SSM states."""

    def __init__(self, copies: BlockCopies, num_slots: int, disk: DiskTier | None) -> None:
        self.copies = copies
        self.slots = copies.new_slots(num_slots) if num_slots else None
        self.disk = disk
        self._entering = threading.Lock()
        """Lock that is held while a load writes to the cache, and while the cache is replaced."""

    def store(self, stores: BlockStores, *, ahead: bool) -> None:
        """Copy entries to their host slots, and queue entries to be written to disk, unless too many bytes
        wait there already."""
        written = [at for at, is_written in enumerate(stores.to_disk) if is_written]
        written = written[: 0 if self.disk is None else self.disk.admit([stores.keys[at] for at in written])]
        others = {at for at, slot in enumerate(stores.slots) if slot}.difference(written)
        for places, keep in ((written, True), (sorted(others), False)):
            if not places:
                continue
            part = stores.part(places)
            out = self.copies.start_out(part.ids, self.slots, part.slots, keep=keep, ahead=ahead)
            if self.disk is not None and out is not None:
                self.disk.write(part.keys, out)

    def load(self, load: BlockLoad, places: Sequence[int], remote: RemoteRead | None = None) -> list[int]:
        """Copy the entries at the indices `places` of `load` from the tiers, or from the engine `remote`, to
        the device; return the indices of entries that cannot be read."""
        failed: list[int] = []
        with self._entering:
            self.copies.begin_in()
        size = _AT_ONCE if remote is None else remote.num_at_once(self.copies.entries.entry_bytes)
        for first in range(0, len(places), size):
            part = places[first : first + size]
            contents = self._read(load, part, remote)
            failed += [place for place in part if place not in contents]
            if contents:
                with self._entering:
                    self.copies.start_in([load.ids[at] for at in contents], [*contents.values()])
            if remote is not None and remote.buffer is not None:
                self.copies.wait_in()  # the next read overwrites the buffer
        self.copies.wait_in()
        return failed

    def _read(
        self, load: BlockLoad, places: Sequence[int], remote: RemoteRead | None
    ) -> dict[int, NDArray[np.uint8] | Tensor]:
        """Return the contents of the entries at `places` that can be read, by their index in `load`."""
        contents: dict[int, NDArray[np.uint8] | Tensor] = {}
        elsewhere = [place for place in places if load.slots[place] == REMOTE]
        if elsewhere and remote is not None:
            keys = [load.keys[place] for place in elsewhere]
            arrived = remote.read(keys, self.copies.entries.entry_bytes)
            contents = {
                place: data for place, data in zip(elsewhere, arrived, strict=True) if data is not None
            }
        files = [place for place in places if load.slots[place] == ON_DISK]
        if files and self.disk is not None:
            read = self.disk.read([load.keys[place] for place in files])
            contents |= {place: data for place, data in zip(files, read, strict=True) if data is not None}
        for place in places:
            if (slot := load.slots[place]) > 0:
                assert self.slots is not None, "there is no host tier"
                contents[place] = self.slots[slot]
        return dict(sorted(contents.items()))

    def rebind(self, copies: BlockCopies) -> None:
        """Replace the device cache by another one of the same layout."""
        with self._entering:
            self.copies.wait_in()
            self.copies = copies


class WorkerTiers:
    """The lower tiers of one worker. Entries are stored in the order of steps, and loaded while steps run."""

    def __init__(
        self, kinds: Sequence[KindTiers], remote: RemoteEngines | None = None, ipc: CudaIpc | None = None
    ) -> None:
        """`kinds` has the tiers of KV blocks, and of SSM state checkpoints if there are any. With `ipc`,
        entries are written to the GPU memory of other engines."""
        self.kinds = kinds
        self.remote, self.ipc = remote, ipc

    def keys(self) -> list[bytes]:
        """Return the keys of all files on disk: those of blocks, then those of checkpoints, each with the
        least recently used first."""
        disks = (kind.disk for kind in self.kinds if kind.disk is not None)
        return [key for keys in map(DiskTier.keys, disks) for key in keys]

    def begin_step(self) -> None:
        """Let the next step wait for the copies of entries that it may overwrite."""
        for kind in self.kinds:
            kind.copies.begin_step()

    def store(self, stores: BlockStores) -> None:
        """Delete the disk files of the keys `stores.dropped`, and copy the other entries of `stores` to their
        host slots and files."""
        num_now = len(stores.ids) - stores.num_ahead
        for is_of_states, kind in enumerate(self.kinds):
            if kind.disk is not None and stores.dropped:
                kind.disk.delete([key for key in stores.dropped if is_state(key) == is_of_states])
            for first, end in ((0, num_now), (num_now, len(stores.ids))):
                places = [at for at in range(first, end) if is_state(stores.keys[at]) == is_of_states]
                kind.store(stores.part(places), ahead=first == num_now)

    def load(self, load: BlockLoad) -> LoadDone:
        """Copy entries to the device. The result lists the entries that could not be read."""
        began, failed = time.monotonic(), list[int]()
        remote = self.remote.open(load.remote) if self.remote is not None and load.remote else None
        try:
            for is_of_states, kind in enumerate(self.kinds):
                places = [at for at, key in enumerate(load.keys) if is_state(key) == is_of_states]
                if places:
                    failed += kind.load(load, places, remote)
        finally:
            if remote is not None:
                remote.close()
        done = LoadDone(failed, time.monotonic() - began if load.keys else 0.0)
        done.remote_problem = "" if remote is None else remote.problem
        for kind in self.kinds:
            done.store_s += kind.copies.take_out_s()
            if kind.disk is not None:
                kind.disk.take_report(done)
        return done

    def read(self, read: BlockRead) -> memoryview:
        """Return the contents of entries as bytes, or nothing if they were written to memory of another
        engine. Nothing may write to these entries during the call."""
        copies = self.kinds[read.are_states].copies
        shape = len(read.ids), copies.entries.entry_bytes
        target, memory = read.target, None
        if target is not None and target.handle and self.ipc is not None:
            buffer = self.ipc.open(target)
            if buffer is not None:
                copies.write_to(buffer, read.ids)
                return memoryview(b"")
        elif target is not None:
            memory = open_memory(target.path, target.nonce)
        if memory is None:
            return copies.read(read.ids).numpy().reshape(-1).data
        out = torch.from_numpy(np.frombuffer(memory, np.uint8, shape[0] * shape[1]).reshape(shape))
        copies.read(read.ids, out)
        return memoryview(b"")

    def rebind(self, copies: Sequence[BlockCopies]) -> None:
        """Replace the device cache by another one of the same layout."""
        for kind, new in zip(self.kinds, copies, strict=True):
            kind.rebind(new)

    def close(self) -> None:
        if self.remote is not None:
            self.remote.close()
        if self.ipc is not None:
            self.ipc.close()
        for kind in self.kinds:
            if kind.disk is not None:
                kind.disk.close()
