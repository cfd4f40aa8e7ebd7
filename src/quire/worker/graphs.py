"""CUDA graphs of decode steps: everything from the tokens in to the tokens sampled, replayed by one call."""

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.data.plan import Ints, StepPlan
from quire.logs import get_logger
from quire.worker.device import Computed, Passed, batch_of
from quire.worker.rows import Rows, Wide
from quire.worker.sheet import Page, Sizes, blank, bytes_of, tensors

log = get_logger(__name__)

IN_FLIGHT = 3
"""Host buffers of each kind: one more than there are steps under way; of a pipeline these are as many as its
stages."""
Compute = Callable[[Batch, dict[str, Tensor]], Computed | Passed]
Room = Callable[[int], Tensor | None]
"""For what the stage before makes of so many tokens."""


def ladder(largest: int) -> list[int]:
    """The batch sizes that are captured: close together where one sequence more costs. Up to 128 what is read
    takes longer than what is computed, and a tile of the products lacks no rows."""
    sizes = [1, 2, 4, 8, 16, 32, 64, *range(128, 209, 16), *range(256, 513, 64), *range(640, 1025, 128)]
    return sorted({min(size, largest) for size in sizes})


def pinned(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Host memory that a CUDA device reads and writes by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


class Graphs:
    """One graph for each size of the ladder, all in one pool of memory."""

    def __init__(
        self, block_tables: Tensor, room: Room = lambda size: None, in_flight: int = IN_FLIGHT
    ) -> None:
        self.block_tables = block_tables
        self.room = room
        self.in_flight = in_flight
        self._by_size: dict[int, Graph] = {}
        self._sizes: list[int] = []

    def capture(self, compute: Compute, largest: int, seconds: float) -> None:
        """Capture the ladder up to `largest`, the largest first: the others fit into its memory. What is
        not done within `seconds` is done without."""
        started, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        for size in reversed(ladder(largest)):
            before = self.room(size)
            self._by_size[size] = Graph(
                size, compute, self.block_tables, pool, before, in_flight=self.in_flight
            )
            if time.monotonic() - started > seconds:
                log.warning("Capturing graphs takes long: batches below %d run without", size)
                break
        self._sizes = sorted(self._by_size)

    def forget(self) -> None:
        """Give up all graphs: they read weights and cache where these lay when they were captured."""
        self._by_size, self._sizes = {}, []

    def find(self, plan: StepPlan) -> "Graph | None":
        """The smallest graph for a plan of decodes."""
        count = max(plan.counts, default=len(plan.rows))
        if not self._sizes or count > self._sizes[-1] or (len(plan.rows) and not plan.is_decode):
            return None
        return self._by_size[self.size_for(count)]

    def size_for(self, count: int) -> int:
        """The size of the smallest graph for so many tokens, or as many where there is none."""
        if not self._sizes or count > self._sizes[-1]:
            return count
        return self._sizes[bisect_left(self._sizes, count)]


class Graph:
    """Decodes of up to `size` sequences. Its inputs have a fixed place on the device."""

    before: Tensor | None = None
    """Where what the stage before sends is to lie."""

    def __init__(
        self,
        size: int,
        compute: Compute,
        block_tables: Tensor,
        pool: Any,
        before: Tensor | None,
        in_flight: int,
    ) -> None:
        num_groups, num_rows, width = block_tables.shape
        self.sizes = Sizes(size, size, size, 2 * size * num_groups, num_groups)
        self.pad_row = num_rows - 1
        self._pad_place = self.pad_row * width
        self._pages = cycle([Page(part, self.sizes) for part in pinned(in_flight, bytes_of(self.sizes))])
        self._memory = torch.empty(bytes_of(self.sizes), dtype=torch.uint8, device=block_tables.device)
        self._sheet = tensors(self._memory, self.sizes)
        page = next(self._pages)
        blank(page.arrays, 0, self.pad_row, self._pad_place)
        self._memory.copy_(page.memory)
        ones = np.ones(size, np.int32)
        batch = batch_of(self._sheet, block_tables, ones, ones)
        batch.before = self.before = before
        compute(batch, self._sheet)  # kernels are compiled and loaded before they are captured
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._done = compute(batch, self._sheet)
        self._done_for: dict[int, Computed | Passed] = {}

    def load(self, plan: StepPlan, all_rows: Rows, places: Wide, ids: Ints) -> None:
        page = next(self._pages)
        if not page.holds(plan, all_rows):
            blank(page.arrays, len(plan.rows), self.pad_row, self._pad_place)
        page.write(plan, all_rows, places, ids)
        page.arrays["block_places"][len(ids) :] = self._pad_place
        self._memory.copy_(page.memory, non_blocking=True)

    def replay(self, count: int) -> Computed | Passed:
        """What the first `count` sequences gave; valid until the next replay of any graph."""
        self._graph.replay()
        done = self._done_for.get(count)
        if done is None:
            done = self._done_for[count] = _first(self._done, count)
        return done


def _first(done: Computed | Passed, count: int) -> Computed | Passed:
    if not isinstance(done, Computed):
        return done[0][:count], done[1][:count]
    hidden, logits, token_ids, asked, rows = done
    assert token_ids is not None and asked is not None and rows is not None
    columns = type(asked)(*(column[:count] for column in asked))
    return Computed(hidden[:count], logits[:count], token_ids[:count], columns, rows[:count])
