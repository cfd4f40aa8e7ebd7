"""The runner: one step on the device."""

from collections.abc import Sequence

import torch

from quire.data.plan import StepPlan
from quire.sampling.sampler import Sampler
from quire.worker.device import Device, Pending
from quire.worker.parts import Part
from quire.worker.slots import Slots


class Runner:
    def __init__(self, *, device: Device, slots: Slots, sampler: Sampler, parts: Sequence[Part]) -> None:
        self.device = device
        self.slots = slots
        self.sampler = sampler
        self.parts = parts

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self.slots.apply(plan)
        for part in self.parts:
            part.begin(plan)
        done = self.device.prepare(plan, self.slots)()
        asked = (plan.drawing, self.slots.sampling, *self.slots.history)
        sampled = self.sampler(done.logits, *asked, done.picked, done.draws)
        for part in self.parts:
            part.end(plan, done.hidden, sampled)
        pending = self.device.land(plan, sampled, self.slots)
        self.slots.advance(plan)
        return pending
