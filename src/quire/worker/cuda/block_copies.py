"""Copies of KV cache entries (blocks, checkpoints of SSM states) between a GPU and pinned host memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.host_memory import host_memory, pin_in_background, rows_pinned_together
from quire.kernels.host_to_device import copy_to_device
from quire.worker.cuda.ipc import PeerBuffer
from quire.worker.kv_tiers import CacheEntries, CopiedBlocks

_LOAD_BYTES = 32 << 20
"""Size limit in bytes of each of the two device buffers through which entries arrive from the host. A buffer
has room for at least one entry."""
_STORE_BYTES = 128 << 20
"""Size limit in bytes of each of the two device buffers through which entries leave to the host. A step waits
if it evicts more than both buffers hold: with a prompt of 8,192 tokens, entries not copied ahead are up to
200 MiB."""
_STORE_DIVISOR = 128
"""The size limit of a buffer to the host is also the cache's size divided by this, but at least
`_LOAD_BYTES`."""


class PinnedBlocks:
    """KV cache entries that are being copied to pinned host memory; `wait` returns their contents."""

    def __init__(self, contents: Tensor, copied: torch.cuda.Event) -> None:
        self._contents, self._copied = contents, copied

    def wait(self) -> NDArray[np.uint8]:
        self._copied.synchronize()
        return self._contents.numpy()


class _Staging:
    """A device buffer for entries between the cache and the host, and the event at the end of its last
    use."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used = torch.cuda.Event()


class CudaBlockCopies:
    """Copies one kind of KV cache entries (blocks, or checkpoints of SSM states) between a GPU and the host,
    on streams beside that of the steps.

    To the host: entries that the next step overwrites are gathered into a buffer on the stream of the steps,
    and copied to the host on a second stream; the step waits if both buffers are in use. Entries that the
    next step does not overwrite are also gathered on the second stream, while the step runs. To the device:
    entries are copied on a third stream, and scattered into the cache on the second stream; no step reads
    them before that.
    """

    def __init__(self, entries: CacheEntries, device: torch.device) -> None:
        self.entries, self.device = entries, device
        self._step_stream = torch.cuda.current_stream(device)
        self._copy_stream, self._load_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._lock = threading.Lock()
        """Held while work is enqueued on the copy stream or the load stream."""
        size = entries.entry_bytes
        self._load_buffers = self._new_buffers(_LOAD_BYTES)
        cache_bytes = size * entries.num_entries
        self._store_buffers = self._new_buffers(
            min(_STORE_BYTES, max(_LOAD_BYTES, cache_bytes // _STORE_DIVISOR))
        )
        self._part_rows = rows_pinned_together(size) if size else 1
        self._ahead_copied = torch.cuda.Event()
        """Event at the end of the copies that run beside a step."""
        self._all_stored = torch.cuda.Event()
        """Event at the end of all copies to the host. Copies to the device wait for it, since they may read
        entries that have just been stored."""
        self._copy_times: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Begin and end of each copy to the host that `take_out_s` has not counted yet."""

    def _new_buffers(self, num_bytes: int) -> list[_Staging]:
        """Allocate two device buffers for entries on their way, of at most `num_bytes` bytes each, or of one
        entry if an entry is larger."""
        size = self.entries.entry_bytes
        count = max(min(num_bytes // max(size, 1), self.entries.num_entries), 1)
        return [*map(_Staging, torch.empty((2, count, size), dtype=torch.uint8, device=self.device))]

    def new_slots(self, count: int) -> Tensor:
        slots = host_memory((count + 1) * self.entries.entry_bytes).view(count + 1, -1)
        pin_in_background(slots)
        return slots

    def begin_step(self) -> None:
        self._step_stream.wait_event(self._ahead_copied)

    def start_out(
        self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int], *, keep: bool, ahead: bool
    ) -> CopiedBlocks | None:
        places = copy_to_device(np.array(ids, np.int64), self.device)
        places.record_stream(self._copy_stream)
        host, began, copied = None, *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        if keep:
            host = torch.empty((len(ids), self.entries.entry_bytes), dtype=torch.uint8, pin_memory=True)
        with self._lock:
            self._copy_stream.wait_stream(self._step_stream)
            began.record(self._copy_stream)
            size = len(self._store_buffers[0].memory)
            for first in range(0, len(ids), size):
                end = min(first + size, len(ids))
                blocks = self._gather(places[first:end], ahead=ahead)
                with torch.cuda.stream(self._copy_stream):
                    if slots is not None:
                        for at, row, count in _runs(rows[first:end], self._part_rows):
                            slots[row : row + count].copy_(blocks[at : at + count], non_blocking=True)
                    if host is not None:
                        host[first:end].copy_(blocks, non_blocking=True)
                    self._store_buffers[-1].used.record()
            copied.record(self._copy_stream)
            self._all_stored.record(self._copy_stream)
            self._copy_times.append((began, copied))
            if ahead:
                self._ahead_copied.record(self._copy_stream)
        return None if host is None else PinnedBlocks(host, copied)

    def _gather(self, places: Tensor, *, ahead: bool) -> Tensor:
        """Gather the cache entries with the indices `places` into the less recently used of the two device
        buffers, and return their contents. `ahead`: the entries stay in place during the next step, so the
        copy may run beside it."""
        staging = self._store_buffers[0]
        self._store_buffers.reverse()
        if ahead:
            with torch.cuda.stream(self._copy_stream):
                return self.entries.gather(places, staging.memory[: len(places)])
        self._step_stream.wait_event(staging.used)
        blocks = self.entries.gather(places, staging.memory[: len(places)])
        self._copy_stream.wait_stream(self._step_stream)
        return blocks

    def take_out_s(self) -> float:
        seconds = 0.0
        with self._lock:
            while self._copy_times and self._copy_times[0][1].query():
                began, copied = self._copy_times.popleft()
                seconds += began.elapsed_time(copied) / 1e3
        return seconds

    def read(self, ids: Sequence[int], out: Tensor | None = None) -> Tensor:
        contents = torch.empty((len(ids), self.entries.entry_bytes), dtype=torch.uint8, pin_memory=True)

        def copy(first: int, blocks: Tensor) -> None:
            contents[first : first + len(blocks)].copy_(blocks, non_blocking=True)

        self._gather_for(ids, copy)
        return contents if out is None else out.copy_(contents)

    def write_to(self, buffer: PeerBuffer, ids: Sequence[int]) -> None:
        size = self.entries.entry_bytes
        self._gather_for(ids, lambda first, blocks: buffer.write(first * size, blocks))

    def _gather_for(self, ids: Sequence[int], copy: Callable[[int, Tensor], object]) -> None:
        """Gather entries into device buffers. For each full buffer, call `copy` with the index of its first
        entry and its contents, to start a copy on the current stream. Wait for the copies."""
        copied = torch.cuda.Event(blocking=True)
        with self._lock, torch.cuda.stream(self._copy_stream):
            places = copy_to_device(np.array(ids, np.int64), self.device)
            count = len(self._load_buffers[0].memory)
            for first in range(0, len(ids), count):
                part, staging = places[first : first + count], self._load_buffers[0]
                self._load_buffers.reverse()
                copy(first, self.entries.gather(part, staging.memory[: len(part)]))
                staging.used.record()
            copied.record()
        copied.synchronize()

    def begin_in(self) -> None:
        with self._lock:
            self._load_stream.wait_event(self._all_stored)
            self._copy_stream.wait_stream(self._step_stream)

    def start_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        rows = [torch.as_tensor(part) for part in contents]
        with self._lock, torch.cuda.stream(self._copy_stream):
            places = copy_to_device(np.array(ids, np.int64), self.device)
            size = len(self._load_buffers[0].memory)
            for first in range(0, len(ids), size):
                part, staging = rows[first : first + size], self._load_buffers[0]
                self._load_buffers.reverse()
                self._load_stream.wait_event(staging.used)
                with torch.cuda.stream(self._load_stream):
                    for at, run in _joined(part, self._part_rows):
                        staging.memory[at : at + len(run)].copy_(run, non_blocking=True)
                self._copy_stream.wait_stream(self._load_stream)
                self.entries.scatter(places[first : first + len(part)], staging.memory[: len(part)])
                staging.used.record()

    def wait_in(self) -> None:
        copied = torch.cuda.Event(blocking=True)
        with self._lock:
            copied.record(self._copy_stream)
        copied.synchronize()


def _runs(rows: Sequence[int], part_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield each run of consecutive numbers in `rows` as (index in `rows`, first row, length); rows 0, which
    stand for no host memory, are left out. A run never crosses a part of `part_rows` rows of host memory,
    since each part is pinned separately."""
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1 or not rows[first] or rows[at] % part_rows == 0:
            if rows[first]:
                yield first, rows[first], at - first
            first = at


def _joined(rows: Sequence[Tensor], part_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each run of n rows that follow each other in host memory, as the index of its first row and a
    tensor [n, size]. A run never crosses a part of `part_rows` rows, since each part is pinned separately."""
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or not _follows(rows[at - 1], rows[at], part_rows):
            row = rows[first]
            yield first, row.as_strided((at - first, len(row)), (len(row), 1))
            first = at


def _follows(row: Tensor, after: Tensor, part_rows: int) -> bool:
    is_same = row.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    is_next = is_same and row.data_ptr() + row.nbytes == after.data_ptr()
    return is_next and after.storage_offset() % (part_rows * len(row)) != 0
