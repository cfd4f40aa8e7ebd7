"""A draft length policy for tests of acceptance."""

from typing import Any

import numpy as np


class EagerPolicy:
    """Drafts as many tokens as possible, and sometimes fewer."""

    def __init__(self) -> None:
        self.num_drafts = self.num_held = self.num_steps = 0

    def admit(self, row: int) -> None: ...

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        self.num_steps += 1
        most = np.minimum(available, (rows + self.num_steps) % 5).astype(np.int32)
        return np.diff(np.minimum(np.cumsum(most), budget), prepend=0).astype(np.int32)

    def learn(self, rows: Any, num_drafts: Any, num_accepted: Any) -> None:
        assert (num_accepted <= num_drafts).all() and (num_accepted >= 0).all()
        self.num_drafts += int(num_drafts.sum())
        self.num_held += int(num_accepted.sum())

    def record_time(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None: ...
