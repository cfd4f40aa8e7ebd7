"""Steps in flight: planned, without a result yet."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.data.stats import StepStats
from quire.data.step_plan import FirstRun, Ints, StepPlan, StepResult
from quire.sched.blocks import Block
from quire.sched.running import RowIds, Running
from quire.sched.step_tokens import StepTokens


@dataclass(slots=True)
class Notes:
    """Events since the last plan, which the next plan takes to the workers or to the statistics: released
    rows, requests that ran for the first time, resumed requests with the seconds for which they were
    preempted, and counts."""

    released: list[int] = field(default_factory=list)
    admitted: dict[str, FirstRun] = field(default_factory=dict)
    resumed: dict[str, float] = field(default_factory=dict)
    stats: StepStats = field(default_factory=StepStats)


@dataclass(slots=True)
class StepInFlight:
    """A plan in flight, with the state needed to apply its result."""

    plan: StepPlan
    notes: Notes
    rows: RowIds
    starts: Ints
    """Number of tokens of each row computed before the step."""
    admissions: NDArray[np.int64]
    """`Running.admission` of each row when the plan was made."""
    indexed: list[Block]
    """Blocks that entered the prefix index with this step."""
    made_at: float = field(default_factory=time.monotonic)
    device_s: float = 0.0
    """`StepResult.device_s` of the step, once it has ended."""
    seconds: float = 0.0
    """Duration of the step, once it has ended."""

    def alive(self, running: Running) -> NDArray[np.bool_]:
        """Return whether the request of each row is still running."""
        alive: NDArray[np.bool_] = running.admission[self.rows] == self.admissions
        return alive

    def count(self, running: Running, sampled: RowIds, pooled: RowIds) -> StepStats:
        """Return the statistics of the step with its token counts. The sampled tokens must not be filled in
        yet."""
        stats = self.notes.stats
        first = pooled if len(pooled) else sampled[running.prompt_len[sampled] == running.num_known[sampled]]
        if len(first):
            stats.num_prompt_tokens = int(running.prompt_len[first].sum())
            stats.num_cached_tokens = int(running.num_cached[first].sum())
            requests = (running.requests[row] for row in first.tolist())  # None: it was aborted meanwhile
            loaded = (0 if request is None else request.num_loaded for request in requests)
            stats.num_loaded_tokens = int(np.minimum([*loaded], running.num_cached[first]).sum())
        stats.num_computed_tokens = self.plan.total_tokens
        return stats

    def shares(self, running: Running, at: float) -> dict[str, float]:
        """Divide the duration of the step, which ended at time `at`, between its requests by their tokens.
        Return the seconds of each timed request, by request id. If the device has not measured the duration,
        the step began when the previous step had ended, or when it was planned if that was later. That is
        less exact: while the host launches the kernels of the next step, it sees the end of this one late."""
        self.seconds, running.stepped_at = self.device_s or at - max(self.made_at, running.stepped_at), at
        if not running.timed:
            return {}
        timed = np.isin(self.rows, list(running.timed)) & self.alive(running)
        seconds = self.plan.num_tokens[timed] * (self.seconds / self.plan.total_tokens)
        return dict(zip(running.ids[self.rows[timed]].tolist(), seconds.tolist(), strict=True))

    def step_tokens(self, running: Running, result: StepResult) -> StepTokens:
        """Return the new tokens and other results of the step, without the rows of requests that have ended
        meanwhile."""
        self.device_s = result.device_s
        rows, plan, alive = self.rows, self.plan, self.alive(running)
        sampled = rows if len(plan.sampling_rows) == len(rows) else rows[plan.samples]
        num_drafts = plan.num_drafts[plan.samples] if len(plan.num_drafts) else plan.num_drafts
        if result.pooled:  # the rows of a pooling model get no token
            pooled = {int(row): result.pooled[int(row)] for row in rows[plan.samples & alive]}
            return StepTokens(running, rows[:0], num_drafts, StepResult(result.token_ids, pooled=pooled), {})
        if not alive.all():
            sampled = rows[plan.samples & alive]
            remaining_rows, is_kept = set(rows[alive].tolist()), alive[plan.samples]
            counts, drafted = result.counts, result.drafted
            by_row: dict[str, Any] = {
                name: {row: value for row, value in getattr(result, name).items() if row in remaining_rows}
                for name in ("logprobs", "prompt_logprobs", "aligned", "sampling_masks")
            }
            result = StepResult(
                token_ids=result.token_ids[np.repeat(is_kept, counts) if len(counts) else is_kept],
                counts=counts[is_kept] if len(counts) else counts,
                drafted=drafted[is_kept] if len(drafted) else drafted,
                routes=result.routes,
                **by_row,
            )
            num_drafts = num_drafts[is_kept] if len(num_drafts) else num_drafts
        starts = {row: int(self.starts[rows == row][0]) for row in result.prompt_logprobs}
        return StepTokens(running, sampled, num_drafts, result, starts)
