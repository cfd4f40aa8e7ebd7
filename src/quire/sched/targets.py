"""Latency targets: the prompt tokens of a step, and the order of prompts, by the targets of the requests.

A step may last as long as the strictest target for inter-token latency among its decodes allows; this limits
the prompt tokens beside them. Prompts are computed in the order of their slack: the time until the first
token is due, less the time that the prompt still takes. A prompt that has missed its target gets a later
deadline, so that prompts that can still meet theirs go first, and none waits forever."""

import math
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.data.request import Request
from quire.data.stats import Backlog
from quire.data.step_plan import Ints
from quire.logs import get_logger
from quire.sched.prefill_limit import LEAST_TOKENS
from quire.sched.running import Running
from quire.sched.step_cost import FIRST_TOKENS, Decodes, StepCost

log = get_logger(__name__)

_MARGIN = 0.85
"""Fraction of a target that a step is planned to take; the remainder is for deviations from the estimate."""
_SMALL_FACTOR, _LARGE_FACTOR, _NEAR = 4 / 3, 2.0, 0.7
"""Factors by which prompt tokens may lengthen a step over one of its decodes and a few prompt tokens,
whatever the target is. The second factor applies if that small step takes more than the fraction _NEAR of the
target: many prompt tokens may take little longer than a few, and prompts that end sooner leave more steps
without them. Steps without prompt tokens follow, until the mean duration is within the target, or within the
first factor of the decodes alone if these take longer."""
_SMALL_INTERVAL, _FAR = 8, 8.0
"""A target is given up only if one of this many last steps with prompt tokens had few of them. If the step
would take more than the second multiple of the target, the last one must have had few."""
_MAX_EXCESS, _MAX_CREDIT, _LEAST_REPAID = 4.0, 2.0, 0.25
"""A step counts as taking at most the first multiple of its planned duration, since an outlier would keep
prompts waiting. Short steps are credited up to the second multiple of the allowed mean duration. A step
without prompt tokens repays at least the third fraction of its duration."""
_RENEWAL = 4.0
"""A missed deadline is replaced by one that is this many times as far from the arrival."""
_COUNT_S = 0.05
"""Seconds between two counts of the backlog (the prompt tokens of all requests that are still to be
computed)."""
_NO_TARGET_S = 10.0
"""Target for the time to first token, in seconds, that orders the requests without a target."""


class Targets:
    """Limits the duration of steps, and orders prompts, by the latency targets of the requests."""

    def __init__(self, *, fair: bool = False, policy: str = "fcfs") -> None:
        """Build the policy. With `fair`, the backlog is counted by tenant; with the scheduling `policy`
        "priority", by priority."""
        self._fair, self._by_priority = fair, policy == "priority"
        self.cost = StepCost()
        self._backlog, self._counted_at = Backlog(), 0.0
        self._warned: set[str] = set()
        self._mean_s = self._planned_s = math.inf
        """Mean duration of steps that the decodes' targets allow, and planned duration of the last step with
        prompt tokens."""
        self._excess_s = 0.0
        """Seconds by which steps with prompt tokens exceeded `_mean_s`, less those that other steps saved;
        negative for a credit."""

    def deadline(self, request: Request, now: float) -> float:
        """Return the monotonic time at which the first token is due."""
        target_s = request.target.ttft_s or _NO_TARGET_S
        waited = (now - request.queued_at) / target_s
        renewals = max(0, math.ceil(math.log(waited, _RENEWAL))) if waited > 1 else 0
        return request.queued_at + target_s * _RENEWAL**renewals

    def due(self, request: Request, now: float, num_computed: int = 0) -> float:
        """Return the monotonic time at which the rest of a prompt must start to meet its deadline if it runs
        alone. Without a target, this is the deadline, so that such requests are in the order of arrival."""
        if not request.target.ttft_s:
            return self.deadline(request, now)
        return self.deadline(request, now) - self.cost.prompt_s(len(request.tokens), num_computed)

    def prompt_limit(self, running: Running, pending: Ints) -> int | None:
        """Return the most prompt tokens of the next step; None if no decode has a target."""
        limit = self._limit(running, pending)
        return 0 if limit is not None and self._excess_s > 0 else limit

    def _limit(self, running: Running, pending: Ints) -> int | None:
        """Return the most prompt tokens of the next step that has any; None if no decode has a target."""
        target_s = float(running.itl_s[running.order[pending <= 1]].min(initial=math.inf))
        if target_s == math.inf:
            self._mean_s, self._excess_s = math.inf, 0.0
            return None
        decodes = Decodes.of(running, pending)
        self._mean_s = max(_MARGIN * target_s, _SMALL_FACTOR * self.cost.step_s(decodes))
        least_s = self.cost.least_s(decodes)
        factor = _SMALL_FACTOR if least_s <= _NEAR * target_s else _LARGE_FACTOR
        seconds = self._planned_s = max(_MARGIN * target_s, factor * least_s)
        interval = _SMALL_INTERVAL if seconds <= _FAR * target_s else 1
        if seconds > target_s and self.cost.num_since_small >= interval:
            # If steps had been slow for another reason, such as the compilation of kernels, large steps would
            # not show it: few prompt tokens are tried before the target is given up.
            return FIRST_TOKENS
        return max(LEAST_TOKENS, self.cost.num_prompt_tokens(seconds, decodes))

    def record_step(self, chunks: Ints, seconds: float) -> None:
        """Record that a step took `seconds`, in which the rows computed `chunks` tokens each."""
        if self._mean_s == math.inf or not (chunks == 1).any():
            return
        if (chunks > 1).any():
            self._excess_s += min(seconds, _MAX_EXCESS * self._planned_s) - self._mean_s
        else:
            self._excess_s -= max(self._mean_s - seconds, _LEAST_REPAID * seconds)
        self._excess_s = max(-_MAX_CREDIT * self._mean_s, self._excess_s)

    def due_times(self, running: Running, pending: Ints, now: float) -> NDArray[np.float64]:
        """Return for every row of `running.order` the time at which its prompt must start (see `due`); 0 for
        decodes."""
        times = np.zeros(len(running))
        for place in np.flatnonzero(pending > 1).tolist():
            row = int(running.order[place])
            times[place] = self.due(running.request(row), now, int(running.num_computed[row]))
        return times

    def backlog(self, requests: Iterable[Request], running: Running) -> Backlog:
        """Return the prompt tokens that are still to be computed, by tenant and priority, and the rate at
        which they are computed, in tokens per second. They are counted at most every `_COUNT_S` seconds."""
        now = time.monotonic()
        if now - self._counted_at >= _COUNT_S:
            self._counted_at, tokens = now, Counter[tuple[int, int]]()
            for request in requests:
                left, row = len(request.tokens), request.row
                if row >= 0:
                    left = int(running.num_tokens[row] - running.num_computed[row])
                if left > 1:
                    tokens[self._fair * request.tenant, self._by_priority * request.priority] += left
            entries = [(tenant, priority, count) for (tenant, priority), count in tokens.items()]
            self._backlog = Backlog(self._prompt_rate(running), entries)
        return self._backlog

    def _prompt_rate(self, running: Running) -> float:
        """Return how many prompt tokens per second are computed beside the rows that decode now; 0 if it is
        not known yet."""
        if not self.cost.is_known:
            return 0.0
        pending = running.num_tokens[running.order] - running.num_computed[running.order]
        limit = self._limit(running, pending)
        if limit is None:
            token_s = self.cost.prompt_s(1)
            return 1 / token_s if token_s else 0.0
        decodes = Decodes.of(running, pending)
        step_s, alone_s = self.cost.step_s(decodes, limit), self.cost.step_s(decodes)
        num_alone = max(0.0, step_s - self._mean_s) / (self._mean_s - alone_s)
        return limit / (step_s + num_alone * alone_s)

    def warn_of_steps(self, running: Running) -> None:
        """Warn once if a step with a single decode takes longer than a target between tokens."""
        if self.cost.is_reliable and "itl" not in self._warned and len(running):
            target_s, one_s = float(running.itl_s[running.order].min()), self.cost.step_s(Decodes(1, 0))
            if one_s > target_s:
                self._warned.add("itl")
                log.warning(
                    "slo_itl_ms=%g cannot be met on this machine: a step with one decode alone takes %.1f "
                    "ms. Set a target above that",
                    1e3 * target_s,
                    1e3 * one_s,
                )

    def warn_of_prompt(self, request: Request) -> None:
        """Warn once if a prompt alone takes longer than its target."""
        if not self.cost.is_reliable or not request.target.ttft_s or "ttft" in self._warned:
            return
        alone_s = self.cost.prompt_s(len(request.tokens))
        if alone_s > request.target.ttft_s:
            self._warned.add("ttft")
            log.warning(
                "slo_ttft_ms=%g cannot be met for long prompts on this machine: a prompt of %d tokens takes "
                "%.0f ms alone. Set a later target for such requests",
                1e3 * request.target.ttft_s,
                len(request.tokens),
                1e3 * alone_s,
            )
