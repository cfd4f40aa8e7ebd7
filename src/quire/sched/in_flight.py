"""Steps whose results are outstanding."""

from dataclasses import dataclass, field

from quire.data.plan import FirstRun, Ints, StepPlan, StepResult
from quire.data.stats import StepStats
from quire.sched.blocks import Block
from quire.sched.running import Running


@dataclass(slots=True)
class Notes:
    """What has happened since the last plan was made; the next one takes it along."""

    released: list[int] = field(default_factory=list)
    admitted: dict[str, FirstRun] = field(default_factory=dict)
    stats: StepStats = field(default_factory=StepStats)


@dataclass(slots=True)
class Flight:
    """A plan on its way, with what only its own result may be measured by."""

    plan: StepPlan
    notes: Notes
    starts: Ints
    """For each row of the plan, how many of its tokens were computed before."""
    admissions: Ints
    """For each row of the plan, whom it was for: `Running.admission` at the time."""
    indexed: list[Block]
    """Blocks that became findable with it."""

    def landed(self, running: Running, result: StepResult) -> "Landed":
        """The result, without the rows whose requests ended meanwhile."""
        rows, samples = self.plan.rows, self.plan.samples
        alive = running.admission[rows] == self.admissions
        if not alive.all():
            samples = samples & alive
            left = set(rows[alive].tolist())
            result = StepResult(
                token_ids=result.token_ids[alive[self.plan.samples]],
                logprobs={row: found for row, found in result.logprobs.items() if row in left},
                prompt_logprobs={row: found for row, found in result.prompt_logprobs.items() if row in left},
            )
        starts = {row: int(self.starts[rows == row][0]) for row in result.prompt_logprobs}
        return Landed(rows[samples], result, starts)


@dataclass(slots=True)
class Landed:
    """What came of a step for the requests that are still here."""

    sampled: Ints
    """The rows that got a token, in the order of `result.token_ids`."""
    result: StepResult
    starts: dict[int, int]
    """By row with prompt logprobs: the first position they are of."""
