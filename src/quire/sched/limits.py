"""Limits of a step, which are lowered if a batch turns out to be too large."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.step_plan import Ints
from quire.logs import get_logger

log = get_logger(__name__)

PATIENCE = 32
"""Number of successful steps after which a lowered limit rises by an eighth. It is doubled each time the
limit is lowered."""
MAX_PATIENCE = 4096
SMALLEST_SHARE = 16
"""Divisor of the smallest token limit: a request that fails alone is retried with fewer tokens per step, down
to the configured limit divided by this number."""

LONGEST_S = 5.0
"""Seconds that a step with prompt tokens should take at most. Between steps, aborted requests are dropped and
new ones are admitted, and /health sees progress."""
LEAST_TIMED = 64
"""Prompt tokens that a step may have, however long it takes."""


class Claim(NamedTuple):
    """Tokens of a step reserved for a waiting request, and the level of its tenant (computed tokens divided
    by weight)."""

    level: float
    num_tokens: int


class StepLimits:
    """The maximum number of rows and tokens of a step, and of tokens of one request in it. They equal the
    settings until a batch fails although each of its requests runs alone. Then they are set to half of the
    failed step, and rise slowly."""

    def __init__(self, *, max_rows: int, max_tokens: int, longest_chunk: int = 0) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.longest_chunk = longest_chunk or max_tokens
        self.paced_tokens: int | None = None
        """Maximum number of tokens of the next step by which its prompts do not delay decodes of other
        tenants, or decodes with a latency target, too much; None: no such limit."""
        self.timed_tokens: int | None = None
        """Maximum number of prompt tokens of the next step by which it takes at most LONGEST_S; None: no such
        limit."""
        self.least_chunk = 1
        """Largest number of tokens of a request that must be computed in one step; the token limit of a step
        is never lower."""
        self._settings = (max_rows, max_tokens)
        self._proven_rows = self._proven_tokens = 0
        """Rows and tokens of the largest step that succeeded."""
        self._patience, self._num_succeeded = PATIENCE, 0
        self._tokens_before: int | None = None
        """Value of `max_tokens` before a retry with fewer tokens; None: no retry is under way."""

    @property
    def budget(self) -> int:
        """Return the most tokens that the next step may compute."""
        if self.paced_tokens is None:
            return self.max_tokens
        return min(max(self.paced_tokens, self.least_chunk), self.max_tokens)

    @property
    def max_chunk(self) -> int:
        """Return the most tokens that the next step may compute of one request."""
        return min(self.longest_chunk, self.budget)

    def require(self, num_tokens: int) -> None:
        """Raise the token limits of a step, at most to their configured values, so that it can compute
        `num_tokens` of one request that cannot be divided between steps."""
        self.least_chunk = max(self.least_chunk, min(num_tokens, self._settings[1]))
        self.max_tokens = max(self.max_tokens, self.least_chunk)

    def divide(
        self, pending: Ints, levels: NDArray[np.float64] | None = None, claim: Claim | None = None
    ) -> Ints:
        """Return how many of its `pending` tokens each row computes in a step, up to the token limit of the
        step. Decodes come first, then prompts in order, or those with the lowest of the `levels` (by row:
        computed tokens of the tenant divided by its weight). Prompts above the level of `claim` leave the
        tokens that it reserves unused."""
        chunks, budget = np.minimum(pending, self.max_chunk), self.budget
        if chunks.sum() + (claim.num_tokens if claim else 0) > budget:
            is_prompt = pending > 1
            order = np.lexsort((is_prompt,) if levels is None else (levels, is_prompt))
            requested = chunks[order]
            spent_before = np.cumsum(requested) - requested
            if claim is not None and levels is not None:
                spent_before[(is_prompt & (levels > claim.level))[order]] += claim.num_tokens
            chunks[order] = np.clip(budget - spent_before, 0, requested)
        return chunks

    def record_time(self, num_prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step. If it was too long, later steps have fewer prompt tokens; the number
        doubles with each step that takes less than half of the longest time."""
        if seconds > LONGEST_S and num_prompt_tokens > LEAST_TIMED:
            self.timed_tokens = max(LEAST_TIMED, int(num_prompt_tokens * LONGEST_S / seconds))
        elif self.timed_tokens is not None and 2 * seconds < LONGEST_S:
            is_full = 2 * num_prompt_tokens >= self.timed_tokens
            most = 2 * self.timed_tokens if is_full else self.timed_tokens
            self.timed_tokens = most if most < self._settings[1] else None

    def record_success(self, num_rows: int, num_tokens: int) -> None:
        """Record that a step with this many rows and tokens succeeded. After some such steps, lowered limits
        rise."""
        self._proven_rows = max(self._proven_rows, num_rows)
        self._proven_tokens = max(self._proven_tokens, num_tokens)
        if (self.max_rows, self.max_tokens) == self._settings or self._tokens_before is not None:
            return
        self._num_succeeded += 1
        if self._num_succeeded >= self._patience:
            self._num_succeeded = 0
            rows, tokens = self._settings
            self.max_rows = min(rows, self.max_rows + max(1, self.max_rows // 8))
            self.max_tokens = min(tokens, self.max_tokens + max(1, self.max_tokens // 8))

    def shrink(self, num_rows: int, num_tokens: int) -> None:
        """Lower the limits after a step of this size failed. Row or token counts that succeeded before are
        not lowered, nor is the token count if each row has one token."""
        if num_rows <= self._proven_rows and num_tokens <= self._proven_tokens:
            self._proven_rows = self._proven_tokens = 0  # steps of this size no longer succeed
        rows, tokens = num_rows > self._proven_rows, num_tokens > max(self._proven_tokens, num_rows)
        if rows:
            self.max_rows = max(1, num_rows // 2)
        if tokens:
            self.max_tokens = min(self.max_tokens, max(self.least_chunk, num_tokens // 2))
        self._record_lowered(
            f"A step of {num_rows} requests and {num_tokens} tokens failed, but each request runs alone"
        )

    def try_fewer_tokens(self, num_tokens: int) -> bool:
        """Set `max_tokens` to half of the `num_tokens` with which a request failed alone. Return False if
        that is too few."""
        fewer = num_tokens // 2
        if fewer < max(self.least_chunk, self._settings[1] // SMALLEST_SHARE):
            return False
        if self._tokens_before is None:
            self._tokens_before = self.max_tokens
        self.max_tokens = fewer
        return True

    def end_retry(self, *, passed: bool) -> bool:
        """End a retry with fewer tokens. Return whether there was one and it helped."""
        before, self._tokens_before = self._tokens_before, None
        if before is None:
            return False
        if passed:
            self._record_lowered("A request failed, but succeeded with fewer tokens in a step")
        else:
            self.max_tokens = before
        return passed

    def _record_lowered(self, cause: str) -> None:
        self._num_succeeded, self._patience = 0, min(2 * self._patience, MAX_PATIENCE)
        log.warning(
            "%s: for now a step holds at most %d requests and %d tokens. If that happens again, lower "
            "max_num_seqs (%d) or max_num_batched_tokens (%d), or leave more memory free with a lower "
            "gpu_memory_utilization",
            cause,
            self.max_rows,
            self.max_tokens,
            *self._settings,
        )
