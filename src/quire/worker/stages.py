"""Stages of a pipeline: what one hands to the next, and the runner of one that is not the last."""

import math
from collections import deque

import numpy as np
import torch

from quire.comm.group import Group, Sending
from quire.data.plan import Pending, StepPlan, StepResult
from quire.errors import EngineError
from quire.worker.device import Device, Passed
from quire.worker.host import Done
from quire.worker.rows import Rows


class Link:
    """A stage's way to its neighbours. Sizes follow from the plan, so that nothing but numbers is sent."""

    def __init__(self, group: Group, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.num_stages = group.size
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._under_way: deque[tuple[Passed, list[Sending]]] = deque()
        """What was sent and may not have arrived: of as many steps as there are stages."""

    def room(self, num_tokens: int) -> Passed:
        """For what comes of so many tokens; zeros."""
        x, residual = torch.zeros(2, num_tokens, self._hidden, dtype=self._dtype, device=self._device)
        return x, residual

    def num_bytes(self, num_tokens: int) -> int:
        """What is received and under way, at most, if each step has so many tokens."""
        return 2 * (self.group.size + 1) * num_tokens * self._hidden * self._dtype.itemsize

    def receive(self, into: Passed) -> None:
        for part in into:
            self.group.receive(part, self.group.rank - 1)
        if self._device.type == "cpu" and _is_mark(into):
            raise EngineError("the step failed in a stage before this one")

    def send(self, passed: Passed) -> None:
        """It must stay as it is. Waits only for what was sent long before, and does so on the device."""
        assert passed[0].dtype == passed[1].dtype == self._dtype
        while len(self._under_way) >= self.group.size:
            for sending in self._under_way.popleft()[1]:
                sending.wait()
        sent = [self.group.isend(part, self.group.rank + 1) for part in passed]
        self._under_way.append((passed, sent))

    def fail(self, num_tokens: int) -> None:
        """The step broke here: send a mark in place of what the stages behind wait for. A CPU sees it; what a
        GPU has would have to be waited for, and there the worker ends."""
        x, residual = self.room(num_tokens)
        self.send((x.fill_(torch.inf), residual.fill_(torch.nan)))


def _is_mark(passed: Passed) -> bool:
    x, residual = (float(part[0, 0]) for part in passed)
    return math.isinf(x) and math.isnan(residual)


class StageRunner:
    """Takes a plan through rows and layers, and hands on what comes out: a stage that is not the last."""

    def __init__(self, *, device: Device, all_rows: Rows, link: Link) -> None:
        self.device = device
        self.all_rows = all_rows
        self.link = link

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self.all_rows.apply(plan)
        step = self.device.prepare(plan, self.all_rows)
        try:
            passed = step.forward()
        except Exception:
            self.link.fail(plan.total_tokens)
            raise
        self.link.send(passed)
        self.all_rows.advance(plan)
        return Done(StepResult(token_ids=np.empty(0, np.int32)))
