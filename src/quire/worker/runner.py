"""Runner: computes and samples the steps of a generating model on the device."""

from collections.abc import Sequence
from functools import partial

import torch

from quire.data.step_plan import Masks, Pending, StepPlan, StepResult
from quire.sampling.sampler import Sampler
from quire.worker.cpu import Done
from quire.worker.device import Device, UnsampledRows
from quire.worker.features import StepFeature
from quire.worker.rows import Rows

_FREE = Masks()


class Runner:
    """Runs a plan: updates the rows, computes on the device, samples, and calls every `StepFeature` before
    and after."""

    def __init__(
        self, *, device: Device, all_rows: Rows, sampler: Sampler, parts: Sequence[StepFeature]
    ) -> None:
        self.device = device
        self.all_rows = all_rows
        self.sampler = sampler
        self.parts = parts
        self._unsampled: UnsampledRows | None = None

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self._unsampled = None
        self.all_rows.apply(plan)
        if not len(plan.rows):
            self.device.prepare(plan, self.all_rows).compute()
            return Done(StepResult(token_ids=plan.rows))
        for part in self.parts:
            part.begin(plan)
        self._unsampled = UnsampledRows(plan, self.device.prepare(plan, self.all_rows).compute())
        return self._unsampled if len(plan.constrained) else self.sample_tokens(_FREE)

    @torch.inference_mode()
    def sample_tokens(self, masks: Masks) -> Pending:
        """Sample all rows of the last plan, its constrained rows under `masks`."""
        assert (step := self._unsampled) is not None, "submit() has no step that waits for sampling"
        self._unsampled = None
        plan, output = step.plan, step.forward_result
        del step.forward_result
        row_state = (plan.logit_rows, self.all_rows.sampling, *self.all_rows.history)
        sampled_in_graph, resample = output.token_ids, None
        if len(plan.constrained):  # the forward pass did not sample the constrained rows
            sampled_in_graph, resample = None, partial(self.device.resample, output)
        sampled = self.sampler(output.logits, *row_state, sampled_in_graph, output.sampling, masks, resample)
        for part in self.parts:
            part.end(plan, output, sampled)
        step.result = self.device.start_readback(plan, output, sampled, self.all_rows)
        self.all_rows.advance(plan)
        return step.result
