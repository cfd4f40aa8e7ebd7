"""Speculation on a GPU: rows of which the device alone knows how many tokens they have."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.speculation import SpecFacts
from quire.data.plan import Ints, StepPlan, spread
from quire.kernels.host_to_device import sent
from quire.kernels.triton.spec import DRAFTED, SpecStep, SpecTokens, derive, look_up, verify
from quire.sampling.counts import Counts
from quire.sampling.rows import SamplingRows
from quire.sampling.transfer import to_device
from quire.worker.input_buffers import slots_of
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter, Told, last_kept

_COUNT = (1 << DRAFTED) - 1


class VerifyInputs(NamedTuple):
    """What a step was computed from."""

    batch: Batch
    step: SpecStep


class Drawn(NamedTuple):
    """What a step leaves for drafts. All is on the device."""

    batch: Batch
    step: SpecStep
    hidden: Tensor
    """[T, hidden]"""
    found: Tensor
    """[B] int32, what `verify` says of each sequence"""


Behind = Callable[[SpecTokens, Drawn], None]
"""What is done behind each step: a drafter looks at it."""


class NgramLookup:
    """Proposes what followed the last tokens when they stood there before, in front of steps with drafts."""

    def __init__(self, least: int, max_rows: int, device: torch.device) -> None:
        self._least = least
        self._scratch = torch.zeros(2, max_rows + 1, dtype=torch.int64, device=device)

    def __call__(self, known: SpecTokens, step: SpecStep) -> None:
        look_up(known, step, self._scratch, self._least)


class Followed:
    """Shows each step to a drafter that looks at the target's states."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def __call__(self, known: SpecTokens, drawn: Drawn) -> None:
        batch, step, hidden, found = drawn
        starts, rows = step.query_starts.long(), step.rows.long()
        num_kept = torch.where(step.planned >= 0, (found & _COUNT).long(), starts[1:] - starts[:-1])
        after = batch.positions[last_kept(batch, num_kept)] + 1
        told = Told(
            next_ids=known.history[rows, after].long(),
            num_kept=num_kept,
            states=torch.cat(batch.aux_hidden_states, 1) if batch.aux_hidden_states else hidden,
        )
        self._drafter.see(batch, told)


class Speculation:
    """What the device knows of its rows, and what follows from that for each step."""

    def __init__(self, facts: SpecFacts, all_rows: Rows, device: torch.device) -> None:
        max_rows, self.max_len = all_rows.tokens.shape
        self.most, self.block_size, self.device = facts.num_speculative_tokens, all_rows.block_size, device
        width, num_rows = self.max_len + self.most + 1, max_rows + 1
        self.known = SpecTokens(
            history=torch.zeros((num_rows, width), dtype=torch.int32, device=device),
            lengths=torch.ones(num_rows, dtype=torch.int32, device=device),
            drafts=torch.zeros((num_rows, self.most), dtype=torch.int64, device=device),
            num_drafts=torch.zeros(num_rows, dtype=torch.int32, device=device),
            width=width,
            most=self.most,
        )
        self.query_lens = sorted({1, self.most // 2 + 1, self.most + 1})
        """Of steps that are captured: with fewer drafts the rest is padding."""
        self.rates: Tensor | None = None
        if facts.synthetic_acceptance_rates:
            self.rates = torch.tensor(facts.synthetic_acceptance_rates, device=device)
        self.ahead: Tensor | None = None
        """As in `Turns`."""
        if all_rows.turns is not None:
            self.ahead = torch.zeros(num_rows, dtype=torch.int64, device=device)
            self.last_turn = all_rows.turns.last
        self.behind: Behind | None = None
        self._look_up: NgramLookup | None = None
        if facts.method == "ngram":
            self._look_up = NgramLookup(facts.prompt_lookup_min or 1, max_rows, device)

    def begin(self, plan: StepPlan, all_rows: Rows) -> None:
        """Rows have new requests, or drafts of the planner's."""
        known = self.known
        for new in plan.admitted:
            row, length = new.row, int(all_rows.num_tokens[new.row])
            tokens = sent(all_rows.tokens[row, :length], self.device)
            known.history[row, :length].copy_(tokens, non_blocking=True)
            known.lengths[row].fill_(length)
            known.num_drafts[row].fill_(0)
            if self.ahead is not None and all_rows.turns is not None:
                self.ahead[row].fill_(int(all_rows.turns.ahead[row]))
        if len(plan.drafts):
            guessed = np.zeros((len(plan.rows), self.most), np.int64)
            guessed[np.arange(self.most) < plan.num_drafts[:, None]] = plan.drafts
            rows = sent(plan.rows.astype(np.int64), self.device)
            known.drafts.index_copy_(0, rows, sent(guessed, self.device))
            known.num_drafts.index_copy_(0, rows, sent(plan.num_drafts, self.device))

    def derive(self, batch: Batch, sheet: dict[str, Tensor], tables: Tensor) -> VerifyInputs:
        """Make the inputs of the decodes, in place."""
        step = SpecStep(*(sheet[name] for name in ("query_starts", "rows", "planned", "draw_starts")))
        slots = [sheet[slots_of(group)] for group in range(len(tables))]
        lens = batch.seq_lens
        if self._look_up is not None and batch.max_query_len > 1:
            self._look_up(self.known, step)
        derive(
            self.known, step, sheet["token_ids"], batch.positions, lens, slots, tables, self.block_size,
            self.max_len,
        )  # fmt: skip
        if self.ahead is not None and batch.turns is not None:
            self._turn(self.ahead, step, batch.positions, batch.turns)
        # By torch: kernels behind it may read lengths before they wait for the one in front of them.
        torch.add(batch.positions[batch.logit_tokens], 1, out=sheet["sample_at"])
        return VerifyInputs(batch, step)

    def _turn(self, ahead: Tensor, step: SpecStep, positions: Tensor, turns: Tensor) -> None:
        """Those of the decodes, in place."""
        tokens = torch.arange(len(positions), dtype=torch.int32, device=self.device)
        seqs = torch.searchsorted(step.query_starts[1:], tokens, right=True).clamp_(max=len(step.rows) - 1)
        found = (positions + ahead[step.rows.long()[seqs]]).clamp_(0, self.last_turn)
        turns.copy_(torch.where(step.planned[seqs] >= 0, found, turns))

    def verify(
        self,
        given: VerifyInputs,
        hidden: Tensor,
        token_ids: Tensor,
        seeds: Tensor,
        later: Tensor | None = None,
    ) -> Tensor:
        """As the kernel, and what is done behind it."""
        found = verify(self.known, given.step, token_ids, seeds, self.rates, later)
        if self.behind is not None:
            self.behind(self.known, Drawn(*given, hidden, found[: len(given.step.rows)]))
        return found


def read(found: Ints, num_seqs: int, plan: StepPlan) -> tuple[Ints, Ints, Ints]:
    """The new tokens of a plan's rows out of what `verify` found, how many each has, and how many drafts it
    had; empty: one each, and none."""
    draws = found[num_seqs : num_seqs + len(plan.logit_rows)]
    if not len(plan.num_drafts):
        return draws, plan.num_drafts, plan.num_drafts
    said = found[: len(plan.rows)][plan.samples]
    counts, num_draws = said & _COUNT, 1 + plan.num_drafts[plan.samples]
    return draws[spread(np.cumsum(num_draws) - num_draws, counts)], counts, said >> DRAFTED


def take_back(counts: Counts, plan: StepPlan, state: SamplingRows, token_ids: Tensor, found: Tensor) -> None:
    """What was drawn behind drafts that did not hold is not counted."""
    num_draws = 1 + plan.num_drafts[plan.samples]
    seqs = np.repeat(np.flatnonzero(plan.samples), num_draws)
    draws = spread(np.zeros(len(num_draws), np.int64), num_draws)
    places = to_device(np.stack((seqs, draws)), token_ids.device)
    counts.take_back(plan.logit_rows, state, token_ids, (found[places[0]] & _COUNT) <= places[1])
