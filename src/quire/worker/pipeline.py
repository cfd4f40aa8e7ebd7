"""Pipeline parallelism: the connection of a stage to the previous and the next one."""

import math
from collections import deque

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.parallel.group import Group, Sending

IntermediateTensors = tuple[Tensor, Tensor]
"""Output of a pipeline stage for the next one: the output of its last layer and the residual, [T, hidden]
each."""


class StageLink:
    """Sends tensors to the next pipeline stage and receives them from the previous one. The receiver knows
    their sizes from the plan of the step."""

    def __init__(self, group: Group, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.num_stages = group.size
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._in_flight: deque[tuple[Tensor, Sending]] = deque()
        """Messages that may still be on their way: at most as many as there are stages."""

    def receive_buffer(self, num_tokens: int) -> Tensor:
        """Return a receive buffer [2, tokens, hidden] of zeros."""
        return torch.zeros(2, num_tokens, self._hidden, dtype=self._dtype, device=self._device)

    def num_bytes(self, num_tokens: int) -> int:
        """Return the maximum bytes of received and sent messages, if each step has `num_tokens` tokens."""
        return 2 * (self.group.size + 1) * num_tokens * self._hidden * self._dtype.itemsize

    def receive(self, into: Tensor) -> None:
        """Receive the previous stage's output of a step into `into`, which may be part of a larger buffer. On
        a CPU, raise EngineError if that stage failed."""
        if not into.numel():
            return
        buffer = into if into.is_contiguous() else into.new_empty(into.shape)
        self.group.receive(buffer, self.group.rank - 1)
        if buffer is not into:
            into.copy_(buffer)
        if self._device.type == "cpu" and _is_mark(into):
            raise EngineError("the step failed in a previous pipeline stage")

    def send(self, passed: IntermediateTensors) -> None:
        """Send a copy of this stage's output to the next stage. Wait only for the message that was sent
        `num_stages` steps ago."""
        self._send(torch.stack(passed))

    def _send(self, message: Tensor) -> None:
        assert message.dtype == self._dtype
        if not message.numel():
            return
        while len(self._in_flight) >= self.group.size:
            self._in_flight.popleft()[1].wait()
        self._in_flight.append((message, self.group.isend(message, self.group.rank + 1)))

    def fail(self, num_tokens: int) -> None:
        """Send an error mark in place of the output of a failed step. A next stage on a CPU recognizes the
        mark. On a GPU it would have to wait for the data to check it, so there the worker of the failed stage
        ends instead."""
        mark = self.receive_buffer(num_tokens)
        mark[0], mark[1] = torch.inf, torch.nan
        self._send(mark)


def _is_mark(message: Tensor) -> bool:
    x, residual = message[:, 0, 0].tolist()
    return math.isinf(x) and math.isnan(residual)
