"""The copy of a step's sampled tokens from the device to the host."""

from collections.abc import Callable

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


class PendingTokens:
    """Sampled tokens that are being copied to the host."""

    def __init__(
        self,
        copied: torch.Event | None,
        tokens: Tensor,
        sampled: Sampled,
        new: NewTokens,
        all_rows: Rows,
        read: Read,
    ) -> None:
        self._read = read
        self._copied = copied
        self._tokens = tokens
        self._sampled = sampled
        self._new = new
        self._all_rows = all_rows

    def ready(self, timeout_s: float) -> bool:
        """Wait for the copy, whatever the timeout, and return True: a step on a GPU is short, or the device
        has failed."""
        if self._copied is not None:
            with device_failures():
                self._copied.synchronize()
        return True

    def wait(self) -> StepResult:
        self.ready(0.0)
        token_ids, counts, drafted = self._read(self._tokens.numpy().astype(np.int32))
        self._all_rows.append_sampled(*self._new, token_ids, counts)
        result = self._sampled.result(self._new.rows, token_ids, counts)
        result.drafted = drafted
        return result
