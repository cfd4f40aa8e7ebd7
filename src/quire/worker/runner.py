"""The runner: one step on the device."""

from collections.abc import Sequence

import torch

from quire.data.plan import Pending, StepPlan, StepResult
from quire.sampling.sampler import Sampler
from quire.worker.device import Device
from quire.worker.host import Done
from quire.worker.parts import Part
from quire.worker.rows import Rows


class Runner:
    """Takes a plan through rows, device, sampler and parts."""

    def __init__(self, *, device: Device, all_rows: Rows, sampler: Sampler, parts: Sequence[Part]) -> None:
        self.device = device
        self.all_rows = all_rows
        self.sampler = sampler
        self.parts = parts

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self.all_rows.apply(plan)
        if not len(plan.rows):
            self.device.prepare(plan, self.all_rows).draw()
            return Done(StepResult(token_ids=plan.rows))
        for part in self.parts:
            part.begin(plan)
        done = self.device.prepare(plan, self.all_rows).draw()
        asked = (plan.sampling_rows, self.all_rows.sampling, *self.all_rows.history)
        sampled = self.sampler(done.logits, *asked, done.token_ids, done.asked, plan.masks)
        for part in self.parts:
            part.end(plan, done.hidden, sampled)
        pending = self.device.land(plan, sampled, self.all_rows)
        self.all_rows.advance(plan)
        return pending
