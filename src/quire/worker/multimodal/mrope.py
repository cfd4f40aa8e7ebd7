"""Turns: the positions by which heads turn, of models that tell time, height and width of images apart."""

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import Media
from quire.data.plan import Ints, StepPlan
from quire.layers.rope import num_turns


class MRopePositions:
    """By row: the positions of a prompt with items, and where the tokens behind it go on."""

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.ahead: Ints = np.zeros(max_rows, np.int32)
        """What is added to the places of the tokens behind a prompt; mostly below 0."""
        self.last = num_turns(max_len) - 1
        """What is further away turns as this does."""
        self._prompts: dict[int, NDArray[np.int32]] = {}
        """[3, prompt] of rows whose prompts are not computed yet."""

    def admit(self, row: int, media: Media | None) -> None:
        self.ahead[row] = 0
        self._prompts.pop(row, None)
        if media is not None and media.positions is not None:
            prompt = np.clip(media.positions.numbers(), 0, self.last)
            self._prompts[row] = prompt
            self.ahead[row] = int(prompt.max()) + 1 - prompt.shape[1]

    def num_axes(self, plan: StepPlan, num_computed: Ints) -> int:
        """3 where some token of the step has other positions in time than in height or width, else 1."""
        for row in [row for row, each in self._prompts.items() if num_computed[row] >= each.shape[1]]:
            del self._prompts[row]
        if not self._prompts:
            return 1
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if (prompt := self._prompts.get(row)) is not None:
                first = int(num_computed[row])
                given = prompt[:, first : first + count]
                if (given != given[0]).any():
                    return 3
        return 1

    def fill(
        self, into: NDArray[np.int64], plan: StepPlan, rows: NDArray[np.intp], places: NDArray[np.intp]
    ) -> None:
        """`into` [axes, tokens or more]; `rows` and `places` are those of each token."""
        into = into[:, : len(places)]
        into[:] = np.clip(places + self.ahead[rows], 0, self.last)
        at = 0
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if (prompt := self._prompts.get(row)) is not None:
                first = int(places[at])
                given = prompt[:, first : first + count]
                into[:, at : at + given.shape[1]] = given[: len(into)]
            at += count
