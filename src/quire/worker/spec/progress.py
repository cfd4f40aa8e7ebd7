"""DraftProgress: how many tokens a separate draft model has computed; it runs only for drafts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.layout import CacheLayout
from quire.data.step_plan import Ints, StepPlan, spread
from quire.kernels.host_to_device import copy_to_device
from quire.worker.rows import Rows

_STEPS_AHEAD = 4
"""Maximum number of submitted steps for which the host does not know the number of accepted drafts yet."""
_ALIGN = 16


class Span(NamedTuple):
    """A range of tokens of a row: those from position `start` up to, but not including, `end`."""

    row: int
    start: int
    end: int


class DraftProgress:
    """Tracks how many tokens of each row a separate draft model has computed at least, and which blocks it
    has computed completely, so that it can reuse them when the target has a prefix cache hit."""

    def __init__(self, all_rows: Rows, groups: Sequence[int], *, lags: bool, ahead: int) -> None:
        """Build the progress for the layer `groups` of a draft model. With `lags`, the model computes missed
        tokens only before it proposes. Without it, as with sliding windows, it computes every step, since its
        blocks may be freed later. `ahead` is the maximum number of tokens of a row that are on the device,
        but not yet known to the host."""
        self.lags = lags
        self._ahead = ahead
        self._all_rows = all_rows
        self.groups = list(groups)
        self._num: Ints = np.zeros(len(all_rows.num_tokens), np.int32)
        self._least: Ints = np.zeros(len(all_rows.num_tokens), np.int32)
        self._most: Ints = np.zeros(len(all_rows.num_tokens), np.int32)
        """Upper bound of the number of tokens of each row, computed from the plans; `_least` is the lower
        bound."""
        self._is_close = np.zeros(len(all_rows.num_tokens), np.bool_)
        """Whether the draft model has computed all tokens of the row but the last two."""
        self._blocks = np.zeros(1, np.bool_)

    def forget(self) -> None:
        """Forget all computed tokens, since the cache is a new one."""
        self._num[:], self._is_close[:], self._blocks[:] = 0, False, False

    def begin(self, plan: StepPlan) -> None:
        """Register the new requests and blocks of a plan."""
        for new in plan.admitted:
            ids = np.array(new.block_ids, np.int32)[self.groups]
            cached = new.num_computed // self._all_rows.block_size
            self._clear_blocks(ids[:, cached:])
            is_computed = (self._flags(ids[:, :cached]) | (ids[:, :cached] == 0)).all(axis=0)
            num_computed = cached if is_computed.all() else int(is_computed.argmin())
            self._num[new.row] = num_computed * self._all_rows.block_size
            self._is_close[new.row] = False
            self._least[new.row] = self._most[new.row] = len(new.token_ids)
        if len(plan.block_rows):
            self._clear_blocks(plan.block_ids[self.groups])

    def _flags(self, ids: Ints) -> NDArray[np.bool_]:
        most = int(ids.max(initial=0))
        if most >= len(self._blocks):
            self._blocks = np.append(self._blocks, np.zeros(most + 1, np.bool_))
        flags: NDArray[np.bool_] = self._blocks[ids]
        return flags

    def _clear_blocks(self, ids: Ints) -> None:
        self._flags(ids)
        self._blocks[ids] = False

    def _lengths(self, rows: NDArray[np.intp]) -> tuple[Ints, Ints]:
        """Return bounds of the number of tokens of these rows. The bounds follow from plans alone, and not
        from results, which reach the ranks of an engine at different times. A plan adds blocks to a row as
        soon as the row may need them."""
        all_rows = self._all_rows
        if not self._ahead:
            return all_rows.num_tokens[rows], all_rows.num_tokens[rows]
        room = all_rows.num_slots(rows).astype(np.int32)
        least = np.maximum(self._least[rows], room - all_rows.block_size - self._ahead)
        return least, np.minimum(self._most[rows], room)

    def missed(self, plan: StepPlan, limit: int) -> tuple[list[Span], NDArray[np.bool_]]:
        """Return the spans of tokens that the draft model must compute before it proposes: all missed tokens
        of rows with drafts but the last two. Without `lags` these are the tokens of all rows, and the current
        chunks of prompts. All spans have at most `limit` tokens together. Also return for each row of the
        plan whether it is late: the limit leaves out some of its missed tokens."""
        rows, all_rows = plan.rows.astype(np.intp), self._all_rows
        decodes = is_decode(plan)
        least, most = self._lengths(rows)
        ends = most - 2
        if not self.lags:
            ends = np.where(decodes, ends, all_rows.num_computed[rows] + plan.num_tokens)
        behind = ends > self._num[rows]
        behind &= ~(decodes & self._is_close[rows])
        if self.lags:
            behind &= (plan.num_drafts > 0) if len(plan.num_drafts) else False
        counts = np.where(behind, ends - self._num[rows], 0)
        num_missed = np.clip(limit - (np.cumsum(counts) - counts), 0, counts)
        late: NDArray[np.bool_] = num_missed < counts
        starts = self._num[rows].copy()
        self._set_computed(rows[late], np.minimum(starts + num_missed, np.maximum(least, starts))[late])
        spans = [
            Span(int(rows[at]), int(starts[at]), int(starts[at] + num_missed[at]))
            for at in np.flatnonzero(num_missed)
        ]
        return spans, late

    def skip(self, plan: StepPlan) -> None:
        """Record that the draft model does not compute this step, so that its tokens are missed."""
        self._is_close[plan.rows] = False
        self._advance(plan)

    def note(self, plan: StepPlan, decodes: NDArray[np.bool_], late: NDArray[np.bool_]) -> None:
        """Record that the draft model has computed all missed tokens except those of the rows that are
        `late`, and the last two tokens of the rows that are `decodes`. Both arguments are flags by row of the
        plan."""
        rows, all_rows = plan.rows.astype(np.intp), self._all_rows
        if self.lags:
            done = decodes & (self._is_close[rows] | (plan.num_drafts > 0))
        else:
            done = decodes | ~is_decode(plan)
        done &= ~late
        self._is_close[rows] = done
        chunks = all_rows.num_computed[rows] + plan.num_tokens
        self._set_computed(rows[done], np.where(decodes, self._lengths(rows)[0], chunks)[done])
        self._advance(plan)

    def _advance(self, plan: StepPlan) -> None:
        rows = plan.sampling_rows.astype(np.intp)
        self._least[rows] += 1
        self._most[rows] += 1 + (plan.num_drafts[plan.samples] if len(plan.num_drafts) else 0)

    def _set_computed(self, rows: NDArray[np.intp], num_tokens: NDArray[Any]) -> None:
        size = self._all_rows.block_size
        first, last = self._num[rows] // size, num_tokens // size
        self._num[rows] = num_tokens
        for at in np.flatnonzero(last > first).tolist():
            ids = self._all_rows.block_tables[self.groups, rows[at], first[at] : last[at]]
            self._flags(ids)
            self._blocks[ids] = True


def open_draft_progress(all_rows: Rows, cache: CacheLayout, first: int, *, ahead: bool) -> DraftProgress:
    """Build the progress of a draft; its layers are numbered from `first` on."""
    groups = [at for at, group in enumerate(cache.groups) if max(group.layers, default=-1) >= first]
    most = _STEPS_AHEAD * all_rows.drafts.shape[1] if ahead else 0
    return DraftProgress(
        all_rows, groups, lags=all(cache.groups[at].window is None for at in groups), ahead=most
    )


def is_decode(plan: StepPlan) -> NDArray[np.bool_]:
    """Return for each row of the plan whether it is a decode, with or without draft tokens."""
    num_drafts = plan.num_drafts if len(plan.num_drafts) else 0
    decodes: NDArray[np.bool_] = plan.samples & (plan.num_tokens == 1 + num_drafts)
    return decodes


def batch_of_spans(
    spans: list[Span], all_rows: Rows, groups: Sequence[int], history: Tensor, tables: Tensor
) -> Batch:
    """Build the batch of these spans of tokens. `history` [rows, length] has the tokens; it and `tables`
    [groups, rows, blocks] are on the device of the batch. Only the cache of these `groups` is written."""
    rows, starts, ends = np.array(spans, np.int32).T
    lens, size = ends - starts, all_rows.block_size
    positions, row_of = spread(starts, lens), np.repeat(rows, lens)
    count, num_tokens = len(rows), len(positions)
    wide = np.full((2 + len(tables), aligned(num_tokens)), -1, np.int64)
    wide[0, :num_tokens], wide[1, :num_tokens] = positions, row_of
    for group in groups:
        blocks = all_rows.block_tables[group, row_of, positions // size].astype(np.int64)
        wide[2 + group, :num_tokens] = np.where(blocks > 0, blocks * size + positions % size, -1)
    narrow = np.zeros((3, aligned(count + 1)), np.int32)
    narrow[0, :count], narrow[1, :count], narrow[2, 1 : count + 1] = ends, rows, np.cumsum(lens)
    places, row_ids, *slots = copy_to_device(wide, tables.device)[:, :num_tokens]
    seq_lens, seqs, query_starts = copy_to_device(narrow, tables.device)
    batch = Batch(
        token_ids=history[row_ids, places].long(),
        positions=places,
        slots=slots[0],
        query_starts=query_starts[: count + 1],
        seq_lens=seq_lens[:count],
        rows=seqs[:count],
        block_tables=tables[0],
        logit_tokens=places,
        query_lens_host=lens,
        seq_lens_host=ends,
    )
    others = zip(slots[1:], tables[1:], strict=True)
    batch.others = tuple(replace(batch, slots=slot, block_tables=table) for slot, table in others)
    return batch


def aligned(length: int) -> int:
    """Round a length up to a multiple of the alignment, since kernels are compiled for aligned pointers."""
    return -(-length // _ALIGN) * _ALIGN
