"""The runner: one step on the device."""

from collections.abc import Sequence
from functools import partial

import torch

from quire.data.plan import Masks, Pending, StepPlan, StepResult
from quire.sampling.sampler import Sampler
from quire.worker.cpu import Done
from quire.worker.device import Device, UnsampledRows
from quire.worker.features import StepFeature
from quire.worker.rows import Rows

_FREE = Masks()


class Runner:
    """Takes a plan through rows, device, sampler and parts."""

    def __init__(
        self, *, device: Device, all_rows: Rows, sampler: Sampler, parts: Sequence[StepFeature]
    ) -> None:
        self.device = device
        self.all_rows = all_rows
        self.sampler = sampler
        self.parts = parts
        self._undrawn: UnsampledRows | None = None

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self._undrawn = None
        self.all_rows.apply(plan)
        if not len(plan.rows):
            self.device.prepare(plan, self.all_rows).draw()
            return Done(StepResult(token_ids=plan.rows))
        for part in self.parts:
            part.begin(plan)
        self._undrawn = UnsampledRows(plan, self.device.prepare(plan, self.all_rows).draw())
        return self._undrawn if len(plan.constrained) else self.draw(_FREE)

    @torch.inference_mode()
    def draw(self, masks: Masks) -> Pending:
        """What the confined rows of the last plan may sample; then all of its rows do."""
        assert (step := self._undrawn) is not None, "there is no step to be drawn"
        self._undrawn = None
        plan, done = step.plan, step.done
        del step.done
        asked = (plan.logit_rows, self.all_rows.sampling, *self.all_rows.history)
        sampled_in_graph, redraw = done.token_ids, None
        if len(plan.constrained):  # of which nothing was sampled in passing
            sampled_in_graph, redraw = None, partial(self.device.redraw, done)
        sampled = self.sampler(done.logits, *asked, sampled_in_graph, done.asked, masks, redraw)
        for part in self.parts:
            part.end(plan, done.hidden, sampled)
        step.drawn = self.device.land(plan, done, sampled, self.all_rows)
        self.all_rows.advance(plan)
        return step.drawn
