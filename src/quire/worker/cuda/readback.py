"""The copy of a step's sampled tokens from the device to the host, and the duration of the step there."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.data.step_plan import Ints, StepResult
from quire.sampling.sampler import Sampled
from quire.worker.device import NewTokens, device_failures
from quire.worker.rows import Rows

Read = Callable[[Ints], tuple[Ints, Ints, Ints]]
"""Function that converts the copied values to the result of a step: its new tokens, the number of new tokens
of each row, and the number of drafts of each row. Empty numbers: one token per row, no drafts."""


class Readback(NamedTuple):
    """Pinned memory for the new tokens of a step in flight, and events at its start and end on the device;
    None on a CPU."""

    buffer: Tensor
    started: torch.Event | None
    copied: torch.Event | None


class PendingTokens:
    """Sampled tokens that are being copied to the host."""

    def __init__(
        self,
        readback: Readback,
        tokens: Tensor,
        sampled: Sampled,
        new: NewTokens,
        all_rows: Rows,
        read: Read,
    ) -> None:
        self._read = read
        self._readback = readback
        self._tokens = tokens
        self._sampled = sampled
        self._new = new
        self._all_rows = all_rows

    def ready(self, timeout_s: float) -> bool:
        """Wait for the copy, whatever the timeout, and return True: a step on a GPU is short, or the device
        has failed."""
        if self._readback.copied is not None:
            with device_failures():
                self._readback.copied.synchronize()
        return True

    def wait(self) -> StepResult:
        self.ready(0.0)
        token_ids, counts, drafted = self._read(self._tokens.numpy().astype(np.int32))
        self._all_rows.append_sampled(*self._new, token_ids, counts)
        result = self._sampled.result(self._new.rows, token_ids, counts)
        result.drafted = drafted
        _, started, copied = self._readback
        if started is not None and copied is not None:
            result.device_s = 1e-3 * started.elapsed_time(copied)
        return result
