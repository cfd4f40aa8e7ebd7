"""Host: the CPU as a device."""

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.batch import Batch
from quire.capacity import MAX_TAPED, activation_bytes, tape_bytes
from quire.config.engine import EngineConfig
from quire.data.plan import Ints, Masks, Pending, StepPlan, StepResult, spread
from quire.kernels.tape import Tapes
from quire.sampling.chance import Asked
from quire.sampling.sampler import Sampled, Sampler
from quire.worker.device import (
    ONE_TOKEN,
    Computed,
    Model,
    NewTokens,
    Passed,
    Step,
    batch_of,
    blank_batch,
    hold,
)
from quire.worker.drafter import Drafter, Told
from quire.worker.memory import Needs
from quire.worker.rows import Rows
from quire.worker.sheet import Page, Sizes, asked_by, asked_of, bytes_of, sizes_of, tensors

_MAX_SHEETS = 32
"""Of other steps: the sheets that were used last are kept."""


class Host:
    """The CPU. Steps are over when they return, so that every value is known before the next one."""

    def __init__(
        self, model: Model, all_rows: Rows, sample: Callable[[Tensor, Asked], Tensor] | None = None
    ) -> None:
        self.model = model
        self.sample = sample
        self.block_tables = torch.from_numpy(all_rows.block_tables)
        self._decodes = cache(_new_sheet)
        """Sheets of taped steps: their tapes read them where they are."""
        self._rooms = cache(model.room)
        """The same for what the stage before sends."""
        self._others = lru_cache(_MAX_SHEETS)(_new_sheet)
        self._tapes = Tapes()
        self._max_taped = MAX_TAPED
        self.drafter: Drafter | None = None
        self.drafts_by_chance = False
        """Whether it draws as the target does, by the same numbers."""
        self._batch: Batch | None = None
        """Of the last step."""
        self._num_seen: Ints = np.zeros(len(all_rows.num_tokens), np.int32)
        """By row: how many of its tokens the draft has seen, and had room for."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler | None) -> Needs:
        """Reckoned: to use memory is to take it here."""
        facts, dtype, limits = config.own_facts, config.model.dtype, config.scheduler
        activations = activation_bytes(
            facts, dtype, num_tokens=limits.max_num_batched_tokens, num_seqs=limits.max_num_seqs
        )
        tapes = tape_bytes(config, self._max_taped)
        link = self.model.link
        passed = 0 if link is None else link.num_bytes(limits.max_num_batched_tokens)
        ep, row_bytes = self.model.ep, facts.hidden * getattr(torch, dtype).itemsize
        gathered = 0 if ep is None else ep.num_bytes(limits.max_num_batched_tokens, row_bytes)
        return Needs(weights, activations + passed + gathered, tapes)

    def warm_up(self, config: EngineConfig) -> None:
        if config.model.enforce_eager:
            self._max_taped = 0

    def draft_by(self, drafter: Drafter, by_chance: bool) -> None:
        self.drafter, self.drafts_by_chance = drafter, by_chance

    def forget(self) -> None:
        self._tapes = Tapes()
        if self.drafter is not None:
            self.drafter.forget()

    def prepare(self, plan: StepPlan, all_rows: Rows) -> Step:
        if not len(plan.rows):
            return self._idle(plan)
        num_rows, adapts = len(plan.rows), self.model.adapts(plan, all_rows)
        axes = all_rows.num_axes(plan)
        sizes = sizes_of(plan, 0, len(all_rows.block_tables), adapters=adapts, axes=axes)
        reach = self.model.reach(plan, all_rows, self.block_tables.device)
        embeds = self.model.embeds(plan, all_rows, self.block_tables.device)
        is_text = embeds is None and reach is None and axes < 3
        taped = plan.query_len > 0 and plan.total_tokens <= self._max_taped and is_text
        page, sheet = self._decodes(sizes) if taped else self._others(sizes)
        page.write(plan, all_rows)
        batch = batch_of(sheet, self.block_tables, plan.num_tokens, page.arrays["seq_lens"])
        batch.before = (self._rooms if taped else self.model.room)(plan.total_tokens)
        batch.embeds, batch.reach = embeds, reach
        self._make_room(batch, plan)
        self._batch = batch

        in_passing = not len(plan.confined)  # what those may sample is known later

        def run() -> Computed | Passed:
            return self._compute(batch, sheet, in_passing)

        if taped:
            key = num_rows, plan.query_len, in_passing, adapts
            return self.model.step(lambda: self._tapes.run(key, run), batch.before)
        return self.model.step(run, batch.before)

    def _idle(self, plan: StepPlan) -> Step:
        """One token that nobody asked for."""
        batch, sheet = blank_batch(ONE_TOKEN, self.block_tables, self.block_tables.device, num_samples=0)
        batch.before = self.model.room(1)
        self._make_room(batch, plan)
        return self.model.step(lambda: self._compute(batch, sheet), batch.before)

    def _make_room(self, batch: Batch, plan: StepPlan) -> None:
        if plan.counts:
            batch.num_real, batch.room = plan.total_tokens, max(plan.counts)

    def _compute(self, batch: Batch, sheet: dict[str, Tensor], in_passing: bool = False) -> Computed | Passed:
        model = self.model
        hidden = model.hidden(batch)
        if not model.draws:
            passed: Passed = hidden
            return passed
        wanted = hidden if len(batch.logit_tokens) == len(hidden) else hidden[batch.logit_tokens]
        logits, asked = model.head(wanted), asked_of(sheet)
        in_passing = in_passing and self.sample is not None and len(logits) > 0
        token_ids = self.sample(logits, asked) if in_passing and self.sample is not None else None
        return Computed(hidden, logits, token_ids, asked, taps=batch.taps)

    def redraw(self, done: Computed, masks: Masks, places: Ints) -> None:
        """The sampler does it."""

    def land(self, plan: StepPlan, done: Computed, sampled: Sampled, all_rows: Rows) -> Pending:
        token_ids, counts = sampled.token_ids.to(torch.int32).numpy(), plan.num_drafts
        first = all_rows.num_computed[plan.rows]
        if len(plan.num_drafts):
            num_drafts = plan.num_drafts[plan.samples]
            counts = hold(token_ids, all_rows.drafts_of(plan), num_drafts)
            token_ids = token_ids[spread(np.cumsum(1 + num_drafts) - 1 - num_drafts, counts)]
        all_rows.learn(*NewTokens.of(plan), token_ids, counts)
        if self.drafter is not None and self._batch is not None:
            if self.model.adapters is not None:
                self.model.adapters.use()  # drafts may come from the ends of the model
            self._propose(self.drafter, self._batch, plan, all_rows, first, counts, done)
        return Done(sampled.result(plan.sampling_rows, token_ids, counts))

    def _propose(
        self,
        drafter: Drafter,
        batch: Batch,
        plan: StepPlan,
        all_rows: Rows,
        first: Ints,
        counts: Ints,
        done: Computed,
    ) -> None:
        """Drafts for the rows of a step, of which the tokens from `first` on were computed."""
        rows, num_kept, most = plan.rows.astype(np.intp), plan.num_tokens, all_rows.drafts.shape[1]
        if len(counts):
            num_kept = num_kept - plan.num_drafts
            num_kept[plan.samples] += counts - 1
        for new in plan.admitted:
            self._num_seen[new.row] = new.num_computed
        ends, num_slots = first + num_kept, all_rows.num_slots(rows)
        told = Told(
            next_ids=torch.from_numpy(np.maximum(all_rows.tokens[rows, ends], 0).astype(np.int64)),
            num_kept=torch.from_numpy(num_kept.astype(np.int64)),
            num_slots=torch.from_numpy(num_slots.astype(np.int64)),
            has_seen=bool((self._num_seen[rows] >= ends - 1).all()),
            states=torch.cat(done.taps, 1) if done.taps else done.hidden,
            draw=self._drawing(rows, all_rows) if self.drafts_by_chance else None,
        )
        all_rows.drafts[rows] = drafter.propose(batch, told, most).numpy()
        self._num_seen[rows] = np.minimum(ends + max(most, 1), num_slots)

    def _drawing(self, rows: NDArray[np.intp], all_rows: Rows) -> Callable[[Tensor, Tensor], Tensor] | None:
        """How these rows sample, wherever; None if nothing can sample in passing."""
        if (sample := self.sample) is None:
            return None
        columns = asked_by(all_rows.sampling, rows)
        return lambda logits, positions: sample(logits, columns._replace(positions=positions))


class Done:
    """A step whose tokens are here."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


def _new_sheet(sizes: Sizes) -> tuple[Page, dict[str, Tensor]]:
    memory = torch.zeros(bytes_of(sizes), dtype=torch.uint8)
    return Page(memory, sizes), tensors(memory, sizes)
