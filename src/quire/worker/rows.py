"""Rows: the worker's permanent row per request. A plan carries only what changes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import MediaItem
from quire.data.plan import Admission, Ints, StepPlan, spread
from quire.data.prompt_embeds import PromptEmbeds
from quire.layers.lora import AdapterSlots
from quire.sampling.rows import SamplingRows
from quire.worker.multimodal.mrope import MRopePositions

Wide = NDArray[np.int64]
EACH_ONE: Ints = np.empty(0, np.int32)
"""In place of how many tokens each row got: one."""


class Rows:
    """Columns by row. Pages that no request has reached are never touched, so large arrays cost little."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_len: int,
        block_size: int,
        sampling: SamplingRows,
        num_groups: int = 1,
        most_drafts: int = 0,
        turns: bool = False,
    ) -> None:
        """As many places as there may be drafts behind the longest sequence may be looked at, too."""
        self.block_size = block_size
        self.sampling = sampling
        self.tokens: Ints = np.zeros((max_rows, max_len), np.int32)
        width = -(-(max_len + most_drafts) // block_size)
        self.block_tables: Ints = np.zeros((num_groups, max_rows + 1, width), np.int32)
        """By group of layers; the row behind all others is padding."""
        self.tables = list(self.block_tables)
        self.num_blocks: Ints = np.zeros(max_rows, np.int32)
        """In every group."""
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_known: Ints = np.zeros(max_rows, np.int32)
        """How many of them have a value here; one that was just sampled may be on the device only."""
        self.num_computed: Ints = np.zeros(max_rows, np.int32)
        self.prompt_len: Ints = np.zeros(max_rows, np.int32)
        self.admitted_in: Ints = np.zeros(max_rows, np.int32)
        """The step in which the row was given to its request."""
        self.adapter: Ints = np.full(max_rows, -1, np.int32)
        """The slot of the request's adapter; -1: it has none."""
        self.slots: AdapterSlots | None = None
        """Of adapters, some of which may bring tokens."""
        self.history = (self.tokens, self.num_tokens, self.prompt_len)
        """What the sampler looks back at."""
        self.block_changes: list[tuple[Wide, Ints]] = []
        """What the last plan changed in `block_tables`: places in the flat tables, and block ids."""
        self.drafts: Ints = np.zeros((max_rows, most_drafts), np.int32)
        """What was proposed here to follow each row's tokens."""
        self.embeds: dict[int, PromptEmbeds] = {}
        """By row: prompts that came as vectors, and are not computed yet."""
        self.turns = MRopePositions(max_rows, max_len) if turns else None
        """Of models whose heads do not always turn by the place of a token."""
        self.items: dict[int, list[MediaItem]] = {}
        """By row: images, videos and sounds of a prompt, unless all of them are computed."""
        self.wholes: dict[int, int] = {}
        """By row: of how many tokens, from the first on, all see each other; of prompts with such items."""
        self.version = 0
        """Counts the plans by which a row got a request."""

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows to the state that the plan starts from."""
        self.block_changes = []
        for row in plan.released:
            self.sampling.release(row)
            self.embeds.pop(row, None)
            self.items.pop(row, None)
            self.wholes.pop(row, None)
        if self.wholes:
            left = self.wholes.items()
            self.wholes = {row: count for row, count in left if self.num_computed[row] < count}
        self.version += bool(plan.admitted)
        for admission in plan.admitted:
            self._admit(admission, plan.step)
        self._append_blocks(plan.block_rows, plan.block_ids)
        if plan.values.size:
            self._hear(*plan.values)
        if len(plan.drafts):
            self.draft(plan)

    def _admit(self, new: Admission, step: int) -> None:
        row, length = new.row, len(new.token_ids)
        self.tokens[row, :length] = new.token_ids
        if new.embeds is not None:
            self.tokens[row, : len(new.embeds)] = -1  # no token that a penalty could count
            self.embeds[row] = new.embeds
        if self.turns is not None:
            self.turns.admit(row, new.media)
        if new.media is not None and new.media.items:
            self.items[row] = new.media.items
        if new.media is not None and new.media.whole > new.num_computed:
            self.wholes[row] = new.media.whole
        self.num_tokens[row] = self.num_known[row] = length
        self.admitted_in[row] = step
        self.num_computed[row] = new.num_computed
        self.prompt_len[row] = new.prompt_len
        self.adapter[row] = new.adapter
        block_ids = np.array(new.block_ids, np.int32)
        count = block_ids.shape[1]
        self._set_blocks(np.full(count, row), np.arange(count), block_ids)
        self.num_blocks[row] = count
        self.sampling.admit(
            row,
            new.params,
            prompt_len=new.prompt_len,
            seed=new.seed,
            stop_ids=new.stop_ids,
            num_new=0 if self.slots is None else int(self.slots.num_new[new.adapter]),
        )

    def _append_blocks(self, rows: Ints, block_ids: Ints) -> None:
        """`rows` is ordered by row; the blocks of each go behind those that it has."""
        if not len(rows):
            return
        if (rows[1:] != rows[:-1]).all():  # one each, as in a decode
            self._set_blocks(rows, self.num_blocks[rows], block_ids)
            self.num_blocks[rows] += 1
            return
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=len(rows)).astype(np.int32)
        place = np.arange(len(rows)) - np.repeat(starts, counts)
        self._set_blocks(rows, self.num_blocks[rows] + place, block_ids)
        self.num_blocks[rows[starts]] += counts

    def _hear(self, rows: Ints, token_ids: Ints) -> None:
        """The last token of each of these rows, which another stage sampled."""
        self.tokens[rows, self.num_tokens[rows] - 1] = token_ids
        self.num_known[rows] = self.num_tokens[rows]

    def draft(self, plan: StepPlan) -> None:
        """Drafts lie behind the tokens of their rows, all of which are known, until `learn` says how many of
        them hold."""
        rows = plan.rows.astype(np.intp)
        places = spread(self.num_tokens[rows], plan.num_drafts)
        self.tokens[np.repeat(rows, plan.num_drafts), places] = self.drafts_of(plan)

    def drafts_of(self, plan: StepPlan) -> Ints:
        """Those of all its rows, one after the other, whoever proposed them."""
        if len(plan.drafts):
            return plan.drafts
        rows, counts = plan.rows.astype(np.intp), plan.num_drafts
        return self.drafts[np.repeat(rows, counts), spread(np.zeros_like(counts), counts)]

    def num_axes(self, plan: StepPlan) -> int:
        """Positions of each token by which heads turn: none where its place says all, one, or three."""
        return 0 if self.turns is None else self.turns.num_axes(plan, self.num_computed)

    def num_slots(self, rows: NDArray[Any]) -> NDArray[Any]:
        """How many tokens each of them has room for, in its blocks and in tables of positions."""
        found: NDArray[Any] = np.minimum(self.num_blocks[rows] * self.block_size, self.tokens.shape[1])
        return found

    def _set_blocks(self, rows: NDArray[Any], columns: NDArray[Any], block_ids: Ints) -> None:
        """`block_ids` [groups, len(rows)]"""
        num_groups, num_rows, width = self.block_tables.shape
        places, ids = rows.astype(np.int64) * width + columns, block_ids.ravel()
        if num_groups > 1:
            places = (np.arange(num_groups)[:, None] * (num_rows * width) + places).ravel()
        self.block_tables.reshape(-1)[places] = ids
        self.block_changes.append((places, ids))

    def joined_changes(self) -> tuple[Wide, Ints]:
        """All changes of the block tables."""
        if len(self.block_changes) == 1:
            return self.block_changes[0]
        if not self.block_changes:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        places, ids = zip(*self.block_changes, strict=True)
        return np.concatenate(places), np.concatenate(ids)

    def advance(self, plan: StepPlan) -> None:
        """The plan is launched: its tokens count as computed, and each row that samples has one more. Drafts
        do not count yet."""
        rows = plan.rows.astype(np.intp)
        self.num_computed[rows] += plan.num_tokens
        if len(plan.num_drafts):
            self.num_computed[rows] -= plan.num_drafts
        self.num_tokens[rows] += plan.samples

    def learn(self, step: int, rows: NDArray[np.intp], token_ids: Ints, counts: Ints = EACH_ONE) -> None:
        """The tokens that `step` sampled for `rows`, one or so many each: what comes behind those that are
        known. A row may have a new owner by now."""
        mine = self.admitted_in[rows] <= step
        if not mine.all():
            token_ids = token_ids[np.repeat(mine, counts) if len(counts) else mine]
            rows, counts = rows[mine], counts[mine] if len(counts) else counts
        places = self.num_known[rows]
        if not len(counts):
            self.tokens[rows, places] = token_ids
            self.num_known[rows] = places + 1
            return
        self.tokens[np.repeat(rows, counts), spread(places, counts)] = token_ids
        self.num_known[rows] = places + counts
        self.num_tokens[rows] += counts - 1
        self.num_computed[rows] += counts - 1
