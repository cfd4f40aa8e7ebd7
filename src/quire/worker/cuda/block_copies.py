"""Copies of KV cache entries between a GPU and pinned host memory, on a stream beside the steps."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.host_memory import host_memory, pin_in_background, rows_pinned_together
from quire.kernels.host_to_device import copy_to_device
from quire.worker.kv_tiers import CacheEntries, CopiedBlocks

_STAGING_BYTES = 32 << 20
"""Device memory of entries on their way: four buffers, of at least one entry each."""


class PinnedBlocks:
    """Entries on their way to pinned memory."""

    def __init__(self, contents: Tensor, copied: torch.cuda.Event) -> None:
        self._contents, self._copied = contents, copied

    def wait(self) -> NDArray[np.uint8]:
        self._copied.synchronize()
        return self._contents.numpy()


class _Staging:
    """Device memory of entries between the cache and the host, and the end of its last use."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used = torch.cuda.Event()


class CudaBlockCopies:
    """Copies of one kind of entries on a GPU.

    Entries that the next step overwrites are gathered on the stream of the steps, and copied to the host on
    another stream. The step waits if both buffers are still being copied. Other entries are gathered on the
    second stream, too, while the step runs. Entries from the host arrive on a third stream, and are scattered
    on the second while the next ones arrive: no step uses them yet."""

    def __init__(self, entries: CacheEntries, device: torch.device) -> None:
        self.entries, self.device = entries, device
        self._main = torch.cuda.current_stream(device)
        self._beside, self._arriving = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._lock = threading.Lock()
        """Held while work is enqueued on the second stream or the third."""
        size = entries.entry_bytes
        self._at_once = max(min(_STAGING_BYTES // max(size, 1), entries.num_entries), 1)
        """Entries in a buffer."""
        self._part_rows = rows_pinned_together(size) if size else 1
        memory = torch.empty((4, self._at_once, size), dtype=torch.uint8, device=device)
        self._inward, self._outward = [*map(_Staging, memory[:2])], [*map(_Staging, memory[2:])]
        self._ahead = torch.cuda.Event()
        """End of the copies that run beside a step."""
        self._stored = torch.cuda.Event()
        """End of all copies to the host: an entry may be loaded as soon as its copy is enqueued."""
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Begin and end of copies to the host."""

    def new_slots(self, count: int) -> Tensor:
        slots = host_memory((count + 1) * self.entries.entry_bytes).view(count + 1, -1)
        pin_in_background(slots)
        return slots

    def begin_step(self) -> None:
        self._main.wait_event(self._ahead)

    def start_out(
        self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int], *, keep: bool, ahead: bool
    ) -> CopiedBlocks | None:
        places = copy_to_device(np.array(ids, np.int64), self.device)
        places.record_stream(self._beside)
        kept, began, copied = None, *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        if keep:
            kept = torch.empty((len(ids), self.entries.entry_bytes), dtype=torch.uint8, pin_memory=True)
        with self._lock:
            self._beside.wait_stream(self._main)
            began.record(self._beside)
            for first in range(0, len(ids), self._at_once):
                end = min(first + self._at_once, len(ids))
                blocks = self._gather(places[first:end], ahead=ahead)
                with torch.cuda.stream(self._beside):
                    if slots is not None:
                        for at, row, count in _runs(rows[first:end], self._part_rows):
                            slots[row : row + count].copy_(blocks[at : at + count], non_blocking=True)
                    if kept is not None:
                        kept[first:end].copy_(blocks, non_blocking=True)
                    self._outward[-1].used.record()
            copied.record(self._beside)
            self._stored.record(self._beside)
            self._timed.append((began, copied))
            if ahead:
                self._ahead.record(self._beside)
        return None if kept is None else PinnedBlocks(kept, copied)

    def _gather(self, places: Tensor, *, ahead: bool) -> Tensor:
        """Return the contents of entries in one of the buffers, the last one of the list from now on."""
        staging = self._outward[0]
        self._outward.reverse()
        if ahead:
            with torch.cuda.stream(self._beside):
                return self.entries.gather(places, staging.memory[: len(places)])
        self._main.wait_event(staging.used)
        blocks = self.entries.gather(places, staging.memory[: len(places)])
        self._beside.wait_stream(self._main)
        return blocks

    def take_out_s(self) -> float:
        seconds = 0.0
        with self._lock:
            while self._timed and self._timed[0][1].query():
                began, copied = self._timed.popleft()
                seconds += began.elapsed_time(copied) / 1e3
        return seconds

    def begin_in(self) -> None:
        with self._lock:
            self._arriving.wait_event(self._stored)
            self._beside.wait_stream(self._main)

    def start_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        rows = [torch.as_tensor(part) for part in contents]
        with self._lock, torch.cuda.stream(self._beside):
            places = copy_to_device(np.array(ids, np.int64), self.device)
            for first in range(0, len(ids), self._at_once):
                part, staging = rows[first : first + self._at_once], self._inward[0]
                self._inward.reverse()
                self._arriving.wait_event(staging.used)
                with torch.cuda.stream(self._arriving):
                    for at, run in _joined(part, self._part_rows):
                        staging.memory[at : at + len(run)].copy_(run, non_blocking=True)
                self._beside.wait_stream(self._arriving)
                self.entries.scatter(places[first : first + len(part)], staging.memory[: len(part)])
                staging.used.record()

    def wait_in(self) -> None:
        copied = torch.cuda.Event(blocking=True)
        with self._lock:
            copied.record(self._beside)
        copied.synchronize()


def _runs(rows: Sequence[int], part_rows: int) -> Iterator[tuple[int, int, int]]:
    """Return the runs of consecutive rows within parts of memory: place, first row and length of each. Rows 0
    are left out."""
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1 or not rows[first] or rows[at] % part_rows == 0:
            if rows[first]:
                yield first, rows[first], at - first
            first = at


def _joined(rows: Sequence[Tensor], part_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Return the rows with those that follow each other in one part of memory as one [n, size], by place."""
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
