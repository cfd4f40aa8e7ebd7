"""M-RoPE positions: separate positions for time, height and width of images and videos."""

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import Media
from quire.data.step_plan import Ints, StepPlan
from quire.layers.rope import num_mrope_positions


class MRopePositions:
    """The M-RoPE positions of prompts with images or videos, and the offset of later positions, by row."""

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.ahead: Ints = np.zeros(max_rows, np.int32)
        """Offset of M-RoPE positions to sequence positions after the prompt; usually negative."""
        self.last = num_mrope_positions(max_len) - 1
        """Last position for which the rotary embedding has a table entry; larger positions are clipped to
        it."""
        self._prompts: dict[int, NDArray[np.int32]] = {}
        """Positions [3, prompt] by row, until the prompt is computed."""

    def admit(self, row: int, media: Media | None) -> None:
        self.ahead[row] = 0
        self._prompts.pop(row, None)
        if media is not None and media.positions is not None:
            prompt = np.clip(media.positions.numbers(), 0, self.last)
            self._prompts[row] = prompt
            self.ahead[row] = int(prompt.max()) + 1 - prompt.shape[1]

    def num_axes(self, plan: StepPlan, num_computed: Ints) -> int:
        """Return 3 if the time, height and width positions of some token in the step differ, otherwise 1."""
        for row in [row for row, prompt in self._prompts.items() if num_computed[row] >= prompt.shape[1]]:
            del self._prompts[row]
        if not self._prompts:
            return 1
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if (prompt := self._prompts.get(row)) is not None:
                first = int(num_computed[row])
                chunk = prompt[:, first : first + count]
                if (chunk != chunk[0]).any():
                    return 3
        return 1

    def fill(
        self, into: NDArray[np.int64], plan: StepPlan, rows: NDArray[np.intp], places: NDArray[np.intp]
    ) -> None:
        """Write the M-RoPE positions of a step's tokens to `into` [axes, tokens or more]; `rows` and `places`
        are each token's row and position in the sequence."""
        into = into[:, : len(places)]
        into[:] = np.clip(places + self.ahead[rows], 0, self.last)
        at = 0
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if (prompt := self._prompts.get(row)) is not None:
                first = int(places[at])
                chunk = prompt[:, first : first + count]
                into[:, at : at + chunk.shape[1]] = chunk[: len(into)]
            at += count
