"""The runner: one step on the device."""

from collections.abc import Sequence

import torch
from torch import nn

from quire.attention.backend import AttentionBackend
from quire.data.plan import StepPlan, StepResult
from quire.sampling.sampler import Sampler
from quire.worker.parts import Part
from quire.worker.prepare import prepare
from quire.worker.slots import Slots


class Runner:
    def __init__(
        self,
        *,
        model: nn.Module,
        attention: AttentionBackend,
        slots: Slots,
        sampler: Sampler,
        parts: Sequence[Part],
        device: torch.device,
    ) -> None:
        self.model = model
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
        hidden = self.model(batch)
        logits = self.model.logits(hidden[batch.logit_tokens])
        s=self.slots; x = self.sampler(logits, plan.rows[plan.samples], s.sampling, s.tokens, s.num_tokens, s.prompt_len)
        result = StepResult(x.token_ids, x.logprobs)
        for part in self.parts:
            part.end(plan, hidden, result)
        self.slots.advance(plan, result.token_ids)
        return result
