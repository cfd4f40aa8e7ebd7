"""Landing: the tokens of a step on their way back from the device."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.data.plan import Ints, StepResult
from quire.sampling.sampler import Sampled
from quire.worker.device import NewTokens, device_failures
from quire.worker.rows import Rows

Read = Callable[[Ints], tuple[Ints, Ints, Ints]]
"""The new tokens of a step's rows out of what came back, how many each has, and how many drafts it had;
empty: one each, and none."""


class PendingTokens:
    """Sampled tokens on their way to the host."""

    def __init__(
        self,
        landed: torch.Event | None,
        tokens: Tensor,
        sampled: Sampled,
        new: NewTokens,
        all_rows: Rows,
        read: Read,
    ) -> None:
        self._read = read
        self._landed = landed
        self._tokens = tokens
        self._sampled = sampled
        self._new = new
        self._all_rows = all_rows

    def ready(self, timeout_s: float) -> bool:
        """However long it takes: steps of a device are short, or it has failed."""
        if self._landed is not None:
            with device_failures():
                self._landed.synchronize()
        return True

    def wait(self) -> StepResult:
        self.ready(0.0)
        token_ids, counts, drafted = self._read(self._tokens.numpy().astype(np.int32))
        self._all_rows.learn(*self._new, token_ids, counts)
        result = self._sampled.result(self._new.rows, token_ids, counts)
        result.drafted = drafted
        return result
