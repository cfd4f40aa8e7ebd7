"""Draft proposals of a model on a GPU, as CUDA graphs that run before the steps with drafts."""

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.step_plan import Ints, StepPlan
from quire.kernels.host_to_device import copy_to_device
from quire.kernels.triton.spec import SpecTokens
from quire.memory import MAX_SAMPLES
from quire.sampling.random import SamplingTensors
from quire.worker.cuda.graphs import capture, pinned, smallest_shape
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter, SampleDrafts, SequenceEnds
from quire.worker.spec.progress import DraftProgress, aligned, batch_of_spans, is_decode

Sample = Callable[[Tensor, SamplingTensors], Tensor]
_INPUTS = ("rows", "num_slots", "seeds", "top_k", "temperature", "top_p", "min_p")


class DraftGraphs:
    """Proposes draft tokens for the rows of a step by a draft model, with CUDA graphs. The number of tokens
    of a row depends on the number of accepted drafts, which only the device knows at that time, so the
    positions and lengths of the draft model's batch are computed on the device."""

    def __init__(
        self,
        drafter: Drafter,
        spec_tokens: SpecTokens,
        tables: Tensor,
        all_rows: Rows,
        sample: Sample,
        draft_progress: DraftProgress | None,
        max_tokens: int,
        *,
        probabilistic: bool,
    ) -> None:
        self.drafter = drafter
        self.spec_tokens = spec_tokens
        self.tables = tables
        self.draft_progress = draft_progress
        self._all_rows = all_rows
        self._sample = sample
        self._is_probabilistic = probabilistic
        self._max_tokens = max_tokens
        self._graphs: dict[tuple[int, int], _DraftGraph] = {}
        self.pad_row = len(all_rows.num_tokens)
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
        room = max(self.pad_row, MAX_SAMPLES)
        self._greedy = SamplingTensors(
            *(torch.zeros(room, dtype=kind, device=tables.device) for kind in kinds)
        )
        """Sampling parameters of greedy sampling, for the largest number of rows."""

    def forget(self) -> None:
        self._graphs = {}
        self.drafter.forget()
        if self.draft_progress is not None:
            self.draft_progress.forget()

    def begin(self, plan: StepPlan) -> None:
        if self.draft_progress is not None:
            self.draft_progress.begin(plan)

    def has_work(self, plan: StepPlan) -> bool:
        """Return whether the drafter runs before a step: the step has drafts, or the draft model computes
        every step to keep its cache complete."""
        return len(plan.num_drafts) > 0 or (self.draft_progress is not None and not self.draft_progress.lags)

    def skip(self, plan: StepPlan) -> None:
        if self.draft_progress is not None:
            self.draft_progress.skip(plan)

    def __call__(self, plan: StepPlan) -> None:
        """Propose drafts for the decodes of a step. The block tables on the device must be up to date."""
        decodes, late = is_decode(plan), np.zeros(len(plan.rows), np.bool_)
        if (progress := self.draft_progress) is not None:
            missed, late = progress.missed(plan, self._max_tokens)
            if missed:
                buffers = self._all_rows, progress.groups, self.spec_tokens.history, self.tables
                self.drafter.catch_up(batch_of_spans(missed, *buffers))
            progress.note(plan, decodes, late)
        if decodes.any():
            self._propose(plan.rows[decodes], int(plan.num_drafts.max(initial=1)))
        if late.any():
            rows = copy_to_device(plan.rows[late].astype(np.int64), self.tables.device)
            self.spec_tokens.num_drafts.index_fill_(0, rows, 0)

    def _propose(self, rows: Ints, most: int) -> None:
        if (shape := smallest_shape(self._graphs, len(rows), most)) is not None:
            self._graphs[shape].replay(self._inputs(rows))
            return
        memory = pinned(len(_INPUTS), aligned(len(rows)), dtype=torch.int64)
        memory.numpy()[:, : len(rows)] = self._inputs(rows)
        self.compute(memory.to(self.tables.device, non_blocking=True)[:, : len(rows)], most)

    def _inputs(self, rows: Ints) -> NDArray[np.int64]:
        """Return the inputs of the draft graph for these rows, [inputs, rows] in the order of `_INPUTS`;
        floats are stored as the bits of float64."""
        state = self._all_rows.sampling
        floats = (state.sample_temperature, state.top_p, state.min_p)
        return np.stack(
            [
                rows.astype(np.int64),
                self._all_rows.num_slots(rows).astype(np.int64),
                state.seed[rows].view(np.int64),
                state.top_k[rows].astype(np.int64),
                *(column[rows].astype(np.float64).view(np.int64) for column in floats),
            ]
        )

    def compute(self, inputs: Tensor, most: int, sample: Sample | None = None) -> None:
        """Propose `most` drafts per row on the device, inside or outside a captured graph. `inputs` are those
        that `_inputs` returns."""
        spec_tokens, rows = self.spec_tokens, inputs[0]
        last = spec_tokens.lengths[rows].long() - 1
        both = torch.stack((last - 1, last), 1).clamp_(min=0)
        ends = SequenceEnds(
            rows=rows.int(),
            ids=spec_tokens.history[rows[:, None], both].long(),
            last=last,
            num_slots=inputs[1],
            tables=self.tables,
            sample=self._draft_sampling(inputs, sample or self._sample),
        )
        spec_tokens.drafts[:, :most].index_copy_(0, rows, self.drafter.propose(ends, most))
        spec_tokens.num_drafts.index_fill_(0, rows, most)

    def _draft_sampling(self, inputs: Tensor, sample: Sample) -> SampleDrafts:
        """Return the function that samples draft tokens: with the parameters of each row, or greedy."""
        params = SamplingTensors(*(column[: inputs.shape[1]] for column in self._greedy))
        if self._is_probabilistic:
            floats = inputs[4:].view(torch.float64).float()
            temperature, top_p, min_p = (column.clone() for column in floats)
            params = SamplingTensors(temperature, inputs[3].int(), top_p, min_p, inputs[2], inputs[2])
        return lambda logits, positions: sample(logits, params._replace(positions=positions))

    def compile(self, size: int, most: int) -> None:
        """Compile the kernels that propose `most` drafts for each of `size` rows, without running them."""

        def sample_dummy(logits: Tensor, params: SamplingTensors) -> Tensor:
            self._sample(logits, params)
            return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

        room = len(_INPUTS), aligned(size)
        inputs = torch.zeros(room, dtype=torch.int64, device=self.tables.device)
        self.compute(inputs[:, :size], most, sample_dummy)

    def capture(self, shapes: list[tuple[int, int]], pool: Any, *, seconds: float, in_flight: int) -> None:
        """Capture a graph for each of the shapes (rows, drafts per row), the largest first. Shapes that are
        not captured within `seconds` run eagerly."""
        began = time.monotonic()
        for size, most in reversed(shapes):
            if time.monotonic() - began < seconds:
                self._graphs[size, most] = _DraftGraph(self, size, most, pool, in_flight)


class _DraftGraph:
    """The captured proposal of drafts for up to `size` rows. The graph's inputs have a fixed address."""

    def __init__(self, owner: DraftGraphs, size: int, most: int, pool: Any, in_flight: int) -> None:
        device, width = owner.tables.device, aligned(size)
        self._host_inputs = cycle(pinned(in_flight, len(_INPUTS), width, dtype=torch.int64))
        self._pad_row = owner.pad_row
        self._memory = torch.zeros((len(_INPUTS), width), dtype=torch.int64, device=device)
        self._memory[0].fill_(self._pad_row)
        inputs = self._memory[:, :size]
        self._graph, _ = capture(lambda: owner.compute(inputs, most), pool)

    def replay(self, inputs: NDArray[np.int64]) -> None:
        host_inputs, count = next(self._host_inputs), inputs.shape[1]
        array = host_inputs.numpy()
        array[:, :count], array[0, count:], array[1:, count:] = inputs, self._pad_row, 0
        self._memory.copy_(host_inputs, non_blocking=True)
        self._graph.replay()
