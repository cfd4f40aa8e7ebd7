"""The runner of a pipeline stage that is not the last."""

import numpy as np
import torch

from quire.data.step_plan import Pending, StepPlan, StepResult
from quire.worker.cpu import Done
from quire.worker.device import Device
from quire.worker.pipeline import StageLink
from quire.worker.rows import Rows


class StageRunner:
    """Runs a plan on a stage before the last: updates rows, computes the layers, sends the output."""

    def __init__(self, *, device: Device, all_rows: Rows, link: StageLink) -> None:
        self.device = device
        self.all_rows = all_rows
        self.link = link

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self.all_rows.apply(plan)
        try:
            passed = self.device.prepare(plan, self.all_rows).compute()
        except Exception:
            self.link.fail(max(plan.total_tokens, 1))
            raise
        self.link.send(passed)
        self.all_rows.advance(plan)
        return Done(StepResult(token_ids=np.empty(0, np.int32)))
