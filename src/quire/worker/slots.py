"""Slots: the worker's permanent row per request. A plan carries only what changes."""

import numpy as np

from quire.data.plan import Admission, Ints, StepPlan
from quire.sampling.rows import SamplingRows


class Slots:
    """Columns by row. Pages that no request has reached are never touched, so large arrays cost little."""

    def __init__(self, *, max_rows: int, max_len: int, block_size: int, sampling: SamplingRows) -> None:
        self.block_size = block_size
        self.sampling = sampling
        self.tokens: Ints = np.zeros((max_rows, max_len), np.int32)
        self.block_tables: Ints = np.zeros((max_rows, -(-max_len // block_size)), np.int32)
        self.num_blocks: Ints = np.zeros(max_rows, np.int32)
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_computed: Ints = np.zeros(max_rows, np.int32)
        self.prompt_len: Ints = np.zeros(max_rows, np.int32)
        self.history = (self.tokens, self.num_tokens, self.prompt_len)
        """What the sampler looks back at."""

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows to the state that the plan starts from."""
        for row in plan.released:
            self.sampling.release(row)
        for admission in plan.admitted:
            self._admit(admission)
        self._append_blocks(plan.block_rows, plan.block_ids)

    def _admit(self, new: Admission) -> None:
        row, length = new.row, len(new.token_ids)
        self.tokens[row, :length] = new.token_ids
        self.num_tokens[row] = length
        self.num_computed[row] = new.num_computed
        self.prompt_len[row] = new.prompt_len
        self.block_tables[row, : len(new.block_ids)] = new.block_ids
        self.num_blocks[row] = len(new.block_ids)
        self.sampling.admit(row, new.params, prompt_len=new.prompt_len, seed=new.seed, stop_ids=new.stop_ids)

    def _append_blocks(self, rows: Ints, block_ids: Ints) -> None:
        """`rows` is grouped; each group's blocks go behind those that the row has."""
        if not len(rows):
            return
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=len(rows)).astype(np.int32)
        place = np.arange(len(rows)) - np.repeat(starts, counts)
        self.block_tables[rows, self.num_blocks[rows] + place] = block_ids
        self.num_blocks[rows[starts]] += counts

    def advance(self, plan: StepPlan, token_ids: Ints) -> None:
        """The plan has been computed, and `token_ids` were drawn for the rows that sample."""
        self.num_computed[plan.rows] += plan.num_tokens
        rows = plan.rows[plan.samples]
        self.tokens[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
