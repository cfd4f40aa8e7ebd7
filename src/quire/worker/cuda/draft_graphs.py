"""Drafts that a model makes on a GPU, in front of the steps that want them, as captured graphs."""

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.plan import Ints, StepPlan
from quire.kernels.host_to_device import sent
from quire.kernels.triton.spec import SpecTokens
from quire.memory import MAX_DRAWS
from quire.sampling.random import SamplingTensors
from quire.worker.cuda.graphs import capturing, pinned
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter, Draw, Ends
from quire.worker.spec.progress import DraftProgress, aligned, batch_of_spans, is_decode

Sample = Callable[[Tensor, SamplingTensors], Tensor]
_INPUTS = ("rows", "num_slots", "seeds", "top_k", "temperature", "top_p", "min_p")


class DraftGraphs:
    """Has a drafter propose to the rows of a step, of which the device alone knows what they have."""

    def __init__(
        self,
        drafter: Drafter,
        known: SpecTokens,
        tables: Tensor,
        all_rows: Rows,
        sample: Sample,
        seen: DraftProgress | None,
        max_tokens: int,
        *,
        by_chance: bool,
    ) -> None:
        self.drafter = drafter
        self.known = known
        self.tables = tables
        self.seen = seen
        self._all_rows = all_rows
        self._sample = sample
        self._by_chance = by_chance
        self._max_tokens = max_tokens
        self._graphs: dict[tuple[int, int], _Front] = {}
        self.pad_row = len(all_rows.num_tokens)
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
        room = max(self.pad_row, MAX_DRAWS)
        self._likeliest = SamplingTensors(
            *(torch.zeros(room, dtype=kind, device=tables.device) for kind in kinds)
        )
        """Of each column as much as the most rows need."""

    def forget(self) -> None:
        self._graphs = {}
        self.drafter.forget()
        if self.seen is not None:
            self.seen.forget()

    def begin(self, plan: StepPlan) -> None:
        """Rows have new requests, and new blocks."""
        if self.seen is not None:
            self.seen.begin(plan)

    def wants(self, plan: StepPlan) -> bool:
        """Whether there is something to do in front of a step."""
        return len(plan.num_drafts) > 0 or (self.seen is not None and not self.seen.lags)

    def skip(self, plan: StepPlan) -> None:
        if self.seen is not None:
            self.seen.skip(plan)

    def __call__(self, plan: StepPlan) -> None:
        """Drafts for the decodes of a step; its blocks are known to the device by now."""
        decodes, late = is_decode(plan), np.zeros(len(plan.rows), np.bool_)
        if (seen := self.seen) is not None:
            missed, late = seen.missed(plan, self._max_tokens)
            if missed:
                given = self._all_rows, seen.groups, self.known.history, self.tables
                self.drafter.catch_up(batch_of_spans(missed, *given))
            seen.note(plan, decodes, late)
        if decodes.any():
            self._propose(plan.rows[decodes], int(plan.num_drafts.max(initial=1)))
        if late.any():
            rows = sent(plan.rows[late].astype(np.int64), self.tables.device)
            self.known.num_drafts.index_fill_(0, rows, 0)

    def _propose(self, rows: Ints, most: int) -> None:
        fitting = (shape for shape in self._graphs if shape[0] >= len(rows) and shape[1] >= most)
        shape = min(fitting, key=lambda shape: shape[0] * shape[1], default=None)
        if shape is not None:
            self._graphs[shape].replay(self._inputs(rows))
            return
        memory = pinned(len(_INPUTS), aligned(len(rows)), dtype=torch.int64)
        memory.numpy()[:, : len(rows)] = self._inputs(rows)
        self.compute(memory.to(self.tables.device, non_blocking=True)[:, : len(rows)], most)

    def _inputs(self, rows: Ints) -> NDArray[np.int64]:
        """[inputs, rows]: numbers that are no integers as their bits in 64."""
        state = self._all_rows.sampling
        wide = (state.sample_temperature, state.top_p, state.min_p)
        return np.stack(
            [
                rows.astype(np.int64),
                self._all_rows.num_slots(rows).astype(np.int64),
                state.seed[rows].view(np.int64),
                state.top_k[rows].astype(np.int64),
                *(each[rows].astype(np.float64).view(np.int64) for each in wide),
            ]
        )

    def compute(self, inputs: Tensor, most: int, sample: Sample | None = None) -> None:
        """All that is done on the device, inside a captured graph and outside."""
        known, rows = self.known, inputs[0]
        last = known.lengths[rows].long() - 1
        both = torch.stack((last - 1, last), 1).clamp_(min=0)
        ends = Ends(
            rows=rows.int(),
            ids=known.history[rows[:, None], both].long(),
            last=last,
            num_slots=inputs[1],
            tables=self.tables,
            draw=self._draw(inputs, sample or self._sample),
        )
        known.drafts[:, :most].index_copy_(0, rows, self.drafter.propose(ends, most))
        known.num_drafts.index_fill_(0, rows, most)

    def _draw(self, inputs: Tensor, sample: Sample) -> Draw:
        """As each row samples, or the likeliest."""
        asked = SamplingTensors(*(column[: inputs.shape[1]] for column in self._likeliest))
        if self._by_chance:
            wide = inputs[4:].view(torch.float64).float()
            heat, top_p, min_p = (column.clone() for column in wide)
            asked = SamplingTensors(heat, inputs[3].int(), top_p, min_p, inputs[2], inputs[2])
        return lambda logits, positions: sample(logits, asked._replace(positions=positions))

    def compile(self, size: int, most: int) -> None:
        """Have the kernels compiled: none of them runs, so that what they give means nothing."""

        def first(logits: Tensor, asked: SamplingTensors) -> Tensor:
            self._sample(logits, asked)
            return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

        room = len(_INPUTS), aligned(size)
        inputs = torch.zeros(room, dtype=torch.int64, device=self.tables.device)
        self.compute(inputs[:, :size], most, first)

    def capture(self, shapes: list[tuple[int, int]], pool: Any, *, seconds: float, in_flight: int) -> None:
        """Graphs for so many rows and drafts, the largest first; what is not done within `seconds` is done
        without."""
        began = time.monotonic()
        for size, most in reversed(shapes):
            if time.monotonic() - began < seconds:
                self._graphs[size, most] = _Front(self, size, most, pool, in_flight)


class _Front:
    """Drafts for up to `size` rows. Its inputs have a fixed place on the device."""

    def __init__(self, fronts: DraftGraphs, size: int, most: int, pool: Any, in_flight: int) -> None:
        device, width = fronts.tables.device, aligned(size)
        self._pages = cycle(pinned(in_flight, len(_INPUTS), width, dtype=torch.int64))
        self._pad_row = fronts.pad_row
        self._memory = torch.zeros((len(_INPUTS), width), dtype=torch.int64, device=device)
        self._memory[0].fill_(self._pad_row)
        inputs = self._memory[:, :size]
        fronts.compute(inputs, most)  # kernels are compiled and loaded before they are captured
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, pool):
            fronts.compute(inputs, most)

    def replay(self, inputs: NDArray[np.int64]) -> None:
        page, count = next(self._pages), inputs.shape[1]
        array = page.numpy()
        array[:, :count], array[0, count:], array[1:, count:] = inputs, self._pad_row, 0
        self._memory.copy_(page, non_blocking=True)
        self._graph.replay()
