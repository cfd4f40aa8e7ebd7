"""The new tokens of a step for the requests that are still running, and the sequences that end with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.request import Request
from quire.data.step_plan import DEAD_END, TOO_COMPLEX, Ints, RowLogprobs, StepResult, Verdict, spread
from quire.sched.running import RowIds, Running


class SequenceEnd(NamedTuple):
    """Position and reason of a sequence's end."""

    place: int
    """Index of the sequence's last token among the new tokens."""
    reason: str
    stop_reason: int | str | None
    keeps_last: bool


@dataclass
class StepTokens:
    """The tokens that a step sampled, concatenated row by row, with its other results."""

    running: Running
    sampled: RowIds
    """The rows that got tokens, in the order of `result.token_ids`."""
    num_drafts: Ints
    """Number of drafts of each row; empty: none."""
    result: StepResult
    starts: dict[int, int]
    """First position of the prompt logprobs of each row that has any."""

    @cached_property
    def rows(self) -> RowIds:
        """Return the row of each token."""
        return np.repeat(self.sampled, self.result.counts) if len(self.result.counts) else self.sampled

    @cached_property
    def lengths(self) -> NDArray[np.integer]:
        """Return the sequence length at each token, after the tokens were filled in."""
        counts, num_known = self.result.counts, self.running.num_known[self.sampled]
        return spread(num_known - counts + 1, counts) if len(counts) else num_known

    def waves(self, wanted: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
        """Yield the indices of the tokens that are marked in `wanted` in groups: the first of each row, then
        the second of each row, and so on."""
        counts, places = self.result.counts, np.flatnonzero(wanted)
        if not len(counts):
            yield places
            return
        turns = spread(np.zeros(len(counts), np.int32), counts)[places]
        for turn in range(int(turns.max(initial=-1)) + 1):
            yield places[turns == turn]

    def fill(self) -> None:
        """Append the sampled tokens of the step to the requests that sampled them."""
        self.running.fill(self.sampled, self.result.token_ids, self.result.counts, self.num_drafts)

    def ends(self, verdicts: dict[int, Verdict]) -> dict[int, SequenceEnd]:
        """Return, by row, the position and reason of each sequence that ends in this step. Only tokens that
        may be the last are checked, and those with a grammar verdict (`verdicts`, by index of the token)."""
        running, rows, lengths, token_ids = self.running, self.rows, self.lengths, self.result.token_ids
        suspect = (
            (lengths >= running.limit[rows]) | (token_ids == running.eos_id[rows]) | running.watched[rows]
        )
        places = np.flatnonzero(suspect & (lengths >= running.min_len[rows])).tolist()
        ends: dict[int, SequenceEnd] = {}
        for place in sorted({*places, *verdicts}):
            row, verdict = int(rows[place]), verdicts.get(place, "")
            if row in ends:
                continue
            tokens = running.tokens[row, : lengths[place]]
            if (why := why_stopped(running.request(row), tokens, verdict)) is not None:
                reason, stop_reason = why
                ends[row] = SequenceEnd(place, *why, keeps_last=verdict == "complete" and stop_reason is None)
        return ends

    def cut(self, ends: dict[int, SequenceEnd]) -> None:
        """Drop the tokens behind the ends of their sequences."""
        counts = self.result.counts
        if not len(counts) or not ends:
            return
        last = np.cumsum(counts) - 1
        kept = counts.copy()
        for at in np.flatnonzero(np.isin(self.sampled, list(ends))).tolist():
            row = int(self.sampled[at])
            behind = int(last[at]) - ends[row].place
            kept[at] -= behind
            self.running.num_known[row] -= behind
            if row in self.result.logprobs:
                self.result.logprobs[row] = self.result.logprobs[row][: kept[at]]
        keeps = spread(last + 1 - counts, kept)
        self.result = msgspec.structs.replace(
            self.result, token_ids=self.result.token_ids[keeps], counts=kept
        )

    def by_request(self) -> dict[str, Any]:
        """Return the logprobs, prompt logprobs, sampling masks and audio alignments of the step: by the name
        of each kind, a dict by request id."""
        result = self.result
        by_row: dict[str, dict[int, Any]] = {
            "logprobs": result.logprobs,
            "sampling_masks": result.sampling_masks,
            "aligned": result.aligned,
        }
        ids = self.running.ids
        values = {name: {ids[row]: value for row, value in rows.items()} for name, rows in by_row.items()}
        return {**values, "prompt_logprobs": self._fresh_prompt_logprobs()}

    def _fresh_prompt_logprobs(self) -> dict[str, list[RowLogprobs]]:
        """Return prompt logprobs by request id, without positions that a preempted request computes again."""
        fresh = {}
        for row, positions in self.result.prompt_logprobs.items():
            request = self.running.request(row)
            new = positions[max(request.num_prompt_logprobs - self.starts[row], 0) :]
            request.num_prompt_logprobs += len(new)
            if new:
                fresh[request.id] = new
        return fresh


def why_stopped(request: Request, tokens: Ints, verdict: Verdict = "") -> tuple[str, int | str | None] | None:
    """Return reason and stop_reason if the sequence ends with its last token, otherwise None. `verdict` is
    that of its grammar, if any."""
    token_id = int(tokens[-1])
    if verdict == "error":
        return "error", DEAD_END
    if verdict == "limit":
        return "error", TOO_COMPLEX
    if token_id == request.eos_id:
        return "stop", None
    if token_id in request.stop_ids:
        return "stop", token_id
    if verdict:
        return "stop", None
    if len(tokens) >= request.limit:
        return "length", None
    repetition = request.repetition
    if repetition is not None and repetition.is_repetition(tokens[request.prompt_len :]):
        return "repetition", "repetition_detected"
    return None
