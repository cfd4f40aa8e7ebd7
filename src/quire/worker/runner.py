"""The runner: one step on the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch
from quire.data.plan import StepPlan, StepResult
from quire.sampling.sampler import Sampler
from quire.worker.parts import Part
from quire.worker.prepare import prepare
from quire.worker.slots import Slots


class Runner:
    def __init__(
        self,
        *,
        forward: Callable[[Batch], Tensor],
        head: Callable[[Tensor], Tensor],
        attention: AttentionBackend,
        slots: Slots,
        sampler: Sampler,
        parts: Sequence[Part],
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.head = head
        self.attention = attention
        self.slots = slots
        self.sampler = sampler
        self.parts = parts
        self.device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self.slots.apply(plan)
        for part in self.parts:
            part.begin(plan)
        batch = prepare(plan, self.slots, self.device)
        self.attention.plan(batch)
        hidden = self.forward(batch)
        logits = self.head(hidden[batch.logit_tokens])
        result = self.sampler(logits, plan.rows[plan.samples], self.slots.sampling, *self.slots.history)
        for part in self.parts:
            part.end(plan, hidden, result)
        self.slots.advance(plan, result.token_ids)
        return result
