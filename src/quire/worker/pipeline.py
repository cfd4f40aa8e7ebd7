"""Stages of a pipeline: what one hands to the next, and the runner of one that is not the last."""

import math
from collections import deque

import numpy as np
import torch
from torch import Tensor

from quire.data.plan import Pending, StepPlan, StepResult
from quire.errors import EngineError
from quire.parallel.group import Group, Sending
from quire.worker.cpu import Done
from quire.worker.device import Device, Passed
from quire.worker.rows import Rows


class StageLink:
    """A stage's way to its neighbours. Sizes follow from the plan, so that nothing but numbers is sent."""

    def __init__(self, group: Group, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.num_stages = group.size
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._under_way: deque[tuple[Tensor, Sending]] = deque()
        """What was sent and may not have arrived: of as many steps as there are stages."""

    def room(self, num_tokens: int) -> Tensor:
        """[2, tokens, hidden] for what comes of so many tokens; zeros."""
        return torch.zeros(2, num_tokens, self._hidden, dtype=self._dtype, device=self._device)

    def num_bytes(self, num_tokens: int) -> int:
        """What is received and under way, at most, if each step has so many tokens."""
        return 2 * (self.group.size + 1) * num_tokens * self._hidden * self._dtype.itemsize

    def receive(self, into: Tensor) -> None:
        """One message, whose room may be a part of a larger one; none of no tokens."""
        if not into.numel():
            return
        whole = into if into.is_contiguous() else into.new_empty(into.shape)
        self.group.receive(whole, self.group.rank - 1)
        if whole is not into:
            into.copy_(whole)
        if self._device.type == "cpu" and _is_mark(into):
            raise EngineError("the step failed in a stage before this one")

    def send(self, passed: Passed) -> None:
        """A copy. Waits only for what was sent as many steps before as there are stages."""
        self._send(torch.stack(passed))

    def _send(self, message: Tensor) -> None:
        assert message.dtype == self._dtype
        if not message.numel():
            return
        while len(self._under_way) >= self.group.size:
            self._under_way.popleft()[1].wait()
        self._under_way.append((message, self.group.isend(message, self.group.rank + 1)))

    def fail(self, num_tokens: int) -> None:
        """The step broke here: send a mark in place of what the stages behind wait for. A CPU sees it; what a
        GPU has would have to be waited for, and there the worker ends."""
        mark = self.room(num_tokens)
        mark[0], mark[1] = torch.inf, torch.nan
        self._send(mark)


def _is_mark(message: Tensor) -> bool:
    x, residual = message[:, 0, 0].tolist()
    return math.isinf(x) and math.isnan(residual)


class StageRunner:
    """Takes a plan through rows and layers, and hands on what comes out: a stage that is not the last."""

    def __init__(self, *, device: Device, all_rows: Rows, link: StageLink) -> None:
        self.device = device
        self.all_rows = all_rows
        self.link = link

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self.all_rows.apply(plan)
        try:
            passed = self.device.prepare(plan, self.all_rows).forward()
        except Exception:
            self.link.fail(max(plan.total_tokens, 1))
            raise
        self.link.send(passed)
        self.all_rows.advance(plan)
        return Done(StepResult(token_ids=np.empty(0, np.int32)))
