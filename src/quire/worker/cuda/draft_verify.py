"""Speculative decoding on a GPU: only the device has the number of tokens of each row."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.speculation import SpecFacts
from quire.data.step_plan import Ints, StepPlan, spread
from quire.kernels.host_to_device import copy_to_device
from quire.kernels.triton.spec import DRAFTED, SpecStep, SpecTokens, derive, look_up, verify
from quire.sampling.counts import Counts
from quire.sampling.rows import SamplingRows
from quire.sampling.transfer import to_device
from quire.worker.input_buffers import slots_of
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter, TargetStates, last_kept

_COUNT = (1 << DRAFTED) - 1


class VerifyInputs(NamedTuple):
    """The batch of a step, and the inputs of its verification, after the device has computed the values that
    depend on the number of accepted drafts."""

    batch: Batch
    step: SpecStep


class VerifiedStep(NamedTuple):
    """The results of a step that a drafter reads: hidden states and verified tokens, all on the device."""

    batch: Batch
    step: SpecStep
    states: tuple[Tensor, ...]
    """Hidden states of the target, [T, hidden] each: of intermediate layers, or the input of its LM head."""
    verified: Tensor
    """[B] int32 for each sequence: its number of new tokens, and from bit DRAFTED on its number of drafts"""


AfterStep = Callable[[SpecTokens, VerifiedStep], None]
"""Function that runs after each step, to update a drafter."""


class NgramLookup:
    """Proposes the tokens that followed an earlier occurrence of the last tokens (n-gram lookup)."""

    def __init__(self, least: int, max_rows: int, device: torch.device) -> None:
        self._least = least
        self._scratch = torch.zeros(2, max_rows + 1, dtype=torch.int64, device=device)

    def __call__(self, spec_tokens: SpecTokens, step: SpecStep) -> None:
        look_up(spec_tokens, step, self._scratch, self._least)


class DrafterUpdate:
    """Passes each step to a drafter that reads the target's hidden states."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def __call__(self, spec_tokens: SpecTokens, verified_step: VerifiedStep) -> None:
        batch, step, states, verified = verified_step
        starts, rows = step.query_starts.long(), step.rows.long()
        num_kept = torch.where(step.planned >= 0, (verified & _COUNT).long(), starts[1:] - starts[:-1])
        after = batch.positions[last_kept(batch, num_kept)] + 1
        target = TargetStates(
            next_ids=spec_tokens.history[rows, after].long(), num_kept=num_kept, states=states
        )
        self._drafter.observe(batch, target)


class Speculation:
    """The tokens of all rows on the device. With speculative decoding the host does not know them when it
    submits a step, so the device derives the inputs of the step from them."""

    def __init__(self, facts: SpecFacts, all_rows: Rows, device: torch.device) -> None:
        max_rows, self.max_len = all_rows.tokens.shape
        self.most, self.block_size, self.device = facts.num_speculative_tokens, all_rows.block_size, device
        width, num_rows = self.max_len + self.most + 1, max_rows + 1
        self.spec_tokens = SpecTokens(
            history=torch.zeros((num_rows, width), dtype=torch.int32, device=device),
            lengths=torch.ones(num_rows, dtype=torch.int32, device=device),
            drafts=torch.zeros((num_rows, self.most), dtype=torch.int64, device=device),
            num_drafts=torch.zeros(num_rows, dtype=torch.int32, device=device),
            width=width,
            most=self.most,
        )
        self.query_lens = sorted({1, self.most // 2 + 1, self.most + 1})
        """Numbers of tokens per sequence (drafts + 1) for which steps are captured; a step with fewer drafts
        is padded to one of them."""
        self.rates: Tensor | None = None
        if facts.synthetic_acceptance_rates:
            self.rates = torch.tensor(facts.synthetic_acceptance_rates, device=device)
        self.ahead: Tensor | None = None
        """[rows], offset of M-RoPE positions to sequence positions after the prompt; None without M-RoPE."""
        if all_rows.mrope is not None:
            self.ahead = torch.zeros(num_rows, dtype=torch.int64, device=device)
            self.last_mrope_position = all_rows.mrope.last
        self.after_step: AfterStep | None = None
        self._look_up: NgramLookup | None = None
        if facts.method == "ngram":
            self._look_up = NgramLookup(facts.prompt_lookup_min or 1, max_rows, device)

    def begin(self, plan: StepPlan, all_rows: Rows) -> None:
        """Copy the tokens of new requests, and the drafts that the scheduler proposed, to the device."""
        spec_tokens = self.spec_tokens
        for new in plan.admitted:
            row, length = new.row, int(all_rows.num_tokens[new.row])
            tokens = copy_to_device(all_rows.tokens[row, :length], self.device)
            spec_tokens.history[row, :length].copy_(tokens, non_blocking=True)
            spec_tokens.lengths[row].fill_(length)
            spec_tokens.num_drafts[row].fill_(0)
            if self.ahead is not None and all_rows.mrope is not None:
                self.ahead[row].fill_(int(all_rows.mrope.ahead[row]))
        if len(plan.drafts):
            drafts = np.zeros((len(plan.rows), self.most), np.int64)
            drafts[np.arange(self.most) < plan.num_drafts[:, None]] = plan.drafts
            rows = copy_to_device(plan.rows.astype(np.int64), self.device)
            spec_tokens.drafts.index_copy_(0, rows, copy_to_device(drafts, self.device))
            spec_tokens.num_drafts.index_copy_(0, rows, copy_to_device(plan.num_drafts, self.device))

    def derive(self, batch: Batch, inputs: dict[str, Tensor], tables: Tensor) -> VerifyInputs:
        """Compute the decodes' tokens, positions, lengths and cache slots on the device, in place."""
        step = SpecStep(*(inputs[name] for name in ("query_starts", "rows", "planned", "sample_starts")))
        slots = [inputs[slots_of(group)] for group in range(len(tables))]
        lens = batch.seq_lens
        if self._look_up is not None and batch.max_query_len > 1:
            self._look_up(self.spec_tokens, step)
        derive(
            self.spec_tokens, step, inputs["token_ids"], batch.positions, lens, slots, tables,
            self.block_size, self.max_len,
        )  # fmt: skip
        if self.ahead is not None and batch.mrope_positions is not None:
            self._set_mrope_positions(self.ahead, step, batch.positions, batch.mrope_positions)
        # A torch operation separates the kernels: those after it may read lengths before they wait.
        torch.add(batch.positions[batch.logit_tokens], 1, out=inputs["sample_at"])
        return VerifyInputs(batch, step)

    def _set_mrope_positions(
        self, ahead: Tensor, step: SpecStep, positions: Tensor, mrope_positions: Tensor
    ) -> None:
        """Set the M-RoPE positions of the decodes, in place."""
        tokens = torch.arange(len(positions), dtype=torch.int32, device=self.device)
        seqs = torch.searchsorted(step.query_starts[1:], tokens, right=True).clamp_(max=len(step.rows) - 1)
        values = (positions + ahead[step.rows.long()[seqs]]).clamp_(0, self.last_mrope_position)
        mrope_positions.copy_(torch.where(step.planned[seqs] >= 0, values, mrope_positions))

    def verify(
        self,
        inputs: VerifyInputs,
        states: tuple[Tensor, ...],
        token_ids: Tensor,
        seeds: Tensor,
        later: Tensor | None = None,
    ) -> Tensor:
        """Verify the drafts, and let the drafter read the target's hidden states. Return the numbers and ids
        of the new tokens in one tensor, from which `read` takes them."""
        verified = verify(self.spec_tokens, inputs.step, token_ids, seeds, self.rates, later)
        if self.after_step is not None:
            self.after_step(
                self.spec_tokens, VerifiedStep(*inputs, states, verified[: len(inputs.step.rows)])
            )
        return verified


def read(verified: Ints, num_seqs: int, plan: StepPlan) -> tuple[Ints, Ints, Ints]:
    """Return the accepted tokens of a plan's rows, the count of each row, and its number of drafts, from the
    result of `verify`. Empty counts: one token per row, no drafts."""
    draws = verified[num_seqs : num_seqs + len(plan.logit_rows)]
    if not len(plan.num_drafts):
        return draws, plan.num_drafts, plan.num_drafts
    results = verified[: len(plan.rows)][plan.samples]
    counts, num_samples = results & _COUNT, 1 + plan.num_drafts[plan.samples]
    return draws[spread(np.cumsum(num_samples) - num_samples, counts)], counts, results >> DRAFTED


def take_back(
    counts: Counts, plan: StepPlan, state: SamplingRows, token_ids: Tensor, verified: Tensor
) -> None:
    """Correct the token counts for penalties: remove the tokens that were sampled after a rejected draft,
    which are no output."""
    num_samples = 1 + plan.num_drafts[plan.samples]
    seqs = np.repeat(np.flatnonzero(plan.samples), num_samples)
    draws = spread(np.zeros(len(num_samples), np.int64), num_samples)
    places = to_device(np.stack((seqs, draws)), token_ids.device)
    counts.take_back(plan.logit_rows, state, token_ids, (verified[places[0]] & _COUNT) <= places[1])
