"""The worker's row state: each running request has a fixed row, and a plan contains only changes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import MediaItem
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.step_plan import Admission, Ints, StepPlan, spread
from quire.layers.lora import AdapterSlots
from quire.sampling.rows import SamplingRows
from quire.worker.multimodal.mrope_rows import MRopePositions

Int64s = NDArray[np.int64]
ONE_EACH: Ints = np.empty(0, np.int32)
"""Empty array in place of the token counts of rows: each row got one token."""


class Rows:
    """The state of running requests, in arrays indexed by row. Pages of the arrays that were never written
    take no memory."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_len: int,
        block_size: int,
        sampling: SamplingRows,
        num_groups: int = 1,
        max_drafts: int = 0,
        uses_mrope: bool = False,
    ) -> None:
        """Allocate the arrays; block tables have `max_drafts` positions after the longest sequence."""
        self.block_size = block_size
        self.sampling = sampling
        self.tokens: Ints = np.zeros((max_rows, max_len), np.int32)
        width = -(-(max_len + max_drafts) // block_size)
        self.block_tables: Ints = np.zeros((num_groups, max_rows + 1, width), np.int32)
        """Block ids [layer groups, max_rows + 1, blocks]; the last row is padding."""
        self.tables = list(self.block_tables)
        self.num_blocks: Ints = np.zeros(max_rows, np.int32)
        """Number of blocks of each row, which is the same in every layer group."""
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_known: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens with a value on the host; the last sampled one may be on the device only."""
        self.num_computed: Ints = np.zeros(max_rows, np.int32)
        self.prompt_len: Ints = np.zeros(max_rows, np.int32)
        self.admitted_in: Ints = np.zeros(max_rows, np.int32)
        """Step in which the row was assigned to its request."""
        self.adapter: Ints = np.full(max_rows, -1, np.int32)
        """Slot of the request's LoRA adapter; -1 if it has none."""
        self.slots: AdapterSlots | None = None
        """LoRA adapter slots, from which the extra tokens of adapters are known; None without LoRA."""
        self.history = (self.tokens, self.num_tokens, self.prompt_len)
        """Arrays that the sampler reads for penalties."""
        self.block_changes: list[tuple[Int64s, Ints]] = []
        """Changes of `block_tables` by the last plan: positions in the flat tables, and block ids."""
        self.drafts: Ints = np.zeros((max_rows, max_drafts), np.int32)
        """Draft tokens that the scheduler proposed on the host, by row."""
        self.embeds: dict[int, PromptEmbeds] = {}
        """Prompt embeddings that are not computed yet, by row."""
        self.mrope = MRopePositions(max_rows, max_len) if uses_mrope else None
        """M-RoPE positions; None for models without M-RoPE."""
        self.items: dict[int, list[MediaItem]] = {}
        """Images, videos and audio of prompts, by row, until all of them are computed."""
        self.num_bidirectional: dict[int, int] = {}
        """Number of tokens, from the first on, that attend to each other bidirectionally, by row."""
        self.version = 0
        """Number of plans that admitted a request."""

    def apply(self, plan: StepPlan) -> None:
        """Apply the changes of a plan to the rows (admitted requests, new blocks), which then have the state
        in which the step starts."""
        self.block_changes = []
        for row in plan.released:
            self.sampling.release(row)
            self.embeds.pop(row, None)
            self.items.pop(row, None)
            self.num_bidirectional.pop(row, None)
        if self.num_bidirectional:
            left = self.num_bidirectional.items()
            self.num_bidirectional = {row: count for row, count in left if self.num_computed[row] < count}
        self.version += bool(plan.admitted)
        for admission in plan.admitted:
            self._admit(admission, plan.step)
        self._append_blocks(plan.block_rows, plan.block_ids)
        if plan.values.size:
            self._set_last_tokens(*plan.values)
        if len(plan.drafts):
            self.write_drafts(plan)

    def _admit(self, new: Admission, step: int) -> None:
        row, length = new.row, len(new.token_ids)
        self.tokens[row, :length] = new.token_ids
        if new.embeds is not None:
            self.tokens[row, : len(new.embeds)] = -1  # not a token that a penalty could count
            self.embeds[row] = new.embeds
        if self.mrope is not None:
            self.mrope.admit(row, new.media)
        if new.media is not None and new.media.items:
            self.items[row] = new.media.items
        if new.media is not None and new.media.num_bidirectional > new.num_computed:
            self.num_bidirectional[row] = new.media.num_bidirectional
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
        """Append blocks to rows; `rows` is sorted."""
        if not len(rows):
            return
        if (rows[1:] != rows[:-1]).all():  # one block each, as in a decode
            self._set_blocks(rows, self.num_blocks[rows], block_ids)
            self.num_blocks[rows] += 1
            return
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=len(rows)).astype(np.int32)
        place = np.arange(len(rows)) - np.repeat(starts, counts)
        self._set_blocks(rows, self.num_blocks[rows] + place, block_ids)
        self.num_blocks[rows[starts]] += counts

    def _set_last_tokens(self, rows: Ints, token_ids: Ints) -> None:
        """Set the last token of these rows, which the last pipeline stage sampled."""
        self.tokens[rows, self.num_tokens[rows] - 1] = token_ids
        self.num_known[rows] = self.num_tokens[rows]

    def write_drafts(self, plan: StepPlan) -> None:
        """Write the draft tokens of a plan after the last tokens of their rows. After the step,
        `append_sampled` writes the accepted and the sampled tokens in their place."""
        rows = plan.rows.astype(np.intp)
        places = spread(self.num_tokens[rows], plan.num_drafts)
        self.tokens[np.repeat(rows, plan.num_drafts), places] = self.drafts_of(plan)

    def drafts_of(self, plan: StepPlan) -> Ints:
        """Return the drafts of all rows of a plan, concatenated."""
        if len(plan.drafts):
            return plan.drafts
        rows, counts = plan.rows.astype(np.intp), plan.num_drafts
        return self.drafts[np.repeat(rows, counts), spread(np.zeros_like(counts), counts)]

    def num_axes(self, plan: StepPlan) -> int:
        """Return the number of M-RoPE positions of each token in a step: 0, 1 or 3."""
        return 0 if self.mrope is None else self.mrope.num_axes(plan, self.num_computed)

    def num_slots(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the number of tokens for which each row has room in its blocks, limited to the maximum
        length."""
        num_tokens: NDArray[Any] = np.minimum(self.num_blocks[rows] * self.block_size, self.tokens.shape[1])
        return num_tokens

    def _set_blocks(self, rows: NDArray[Any], columns: NDArray[Any], block_ids: Ints) -> None:
        """Set block-table entries; `block_ids` is [groups, len(rows)]."""
        num_groups, num_rows, width = self.block_tables.shape
        places, ids = rows.astype(np.int64) * width + columns, block_ids.ravel()
        if num_groups > 1:
            places = (np.arange(num_groups)[:, None] * (num_rows * width) + places).ravel()
        self.block_tables.reshape(-1)[places] = ids
        self.block_changes.append((places, ids))

    def all_block_changes(self) -> tuple[Int64s, Ints]:
        """Return all changes of the block tables, concatenated."""
        if len(self.block_changes) == 1:
            return self.block_changes[0]
        if not self.block_changes:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        places, ids = zip(*self.block_changes, strict=True)
        return np.concatenate(places), np.concatenate(ids)

    def advance(self, plan: StepPlan) -> None:
        """Advance the rows after the plan is launched: its tokens count as computed, and each sampling row
        has one more token. Draft tokens are counted later, when it is known how many were accepted."""
        rows = plan.rows.astype(np.intp)
        self.num_computed[rows] += plan.num_tokens
        if len(plan.num_drafts):
            self.num_computed[rows] -= plan.num_drafts
        self.num_tokens[rows] += plan.samples

    def append_sampled(
        self, step: int, rows: NDArray[np.intp], token_ids: Ints, counts: Ints = ONE_EACH
    ) -> None:
        """Append the tokens that the step number `step` sampled for `rows` to the known tokens: `counts` of
        each row, or one if it is empty. Rows that meanwhile belong to another request are skipped."""
        is_current = self.admitted_in[rows] <= step
        if not is_current.all():
            token_ids = token_ids[np.repeat(is_current, counts) if len(counts) else is_current]
            rows, counts = rows[is_current], counts[is_current] if len(counts) else counts
        places = self.num_known[rows]
        if not len(counts):
            self.tokens[rows, places] = token_ids
            self.num_known[rows] = places + 1
            return
        self.tokens[np.repeat(rows, counts), spread(places, counts)] = token_ids
        self.num_known[rows] = places + counts
        self.num_tokens[rows] += counts - 1
        self.num_computed[rows] += counts - 1
