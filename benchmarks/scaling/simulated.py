"""A deployment in virtual time: real schedulers, steps of computed duration, and a router."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from layouts import StepCost
from step_costs import StepShape

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepOutput, StepPlan, StepResult
from quire.frontend.router import Router
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler

MOST_CORES, MOST_IN_LOCKSTEP = 2, 8
"""Number of cores simulated out of those with equal traffic; the others behave the same."""
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests to the simulated cores: their number, rate and lengths."""

    num_requests: int
    input_len: int
    output_len: int
    concurrency: int = 0
    """Number of concurrent requests, a new one for each that ends; 0: use the rate instead."""
    rate: float = 0.0
    """Mean requests per second of a Poisson process."""
    spread: float = 0.5
    """Lengths are uniform within this fraction below and above the mean."""
    seed: int = 0

    @property
    def longest(self) -> int:
        return int((1 + self.spread) * (self.input_len + self.output_len)) + 2

    def requests(self) -> Iterator[tuple[float, Request]]:
        """Yield requests in the order of arrival; times are 0 if concurrency decides."""
        draw, at = random.Random(self.seed), 0.0
        for number in range(self.num_requests):
            at += draw.expovariate(self.rate) if self.rate else 0.0
            num_in, num_out = (
                max(1, round(length * draw.uniform(1 - self.spread, 1 + self.spread)))
                for length in (self.input_len, self.output_len)
            )
            yield (
                at,
                Request(
                    id=str(number),
                    tokens=[0] * num_in,
                    params=SamplingParams(max_tokens=num_out, ignore_eos=True),
                    prompt_len=num_in,
                    limit=num_in + num_out,
                    seed=number,
                ),
            )


class SimulatedCore:
    """The scheduler of a core, and the pipeline stages that compute its plans."""

    def __init__(
        self, cost: StepCost, *, max_len: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.cost, num_stages = cost, cost.layout.pp
        kv = KVManager(
            num_blocks=min(cost.kv_tokens(), max_num_seqs * max_len) // BLOCK_SIZE + 1,
            block_size=BLOCK_SIZE,
            max_rows=max_num_seqs,
            share_prefixes=False,
        )
        self.scheduler = Scheduler(
            kv=kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_len,
            num_stages=num_stages,
        )
        self._depth = max(num_stages, 2)
        self._free_at = [0.0] * num_stages
        """Time in seconds at which each pipeline stage has finished its work."""
        self._flights: deque[tuple[StepPlan, float]] = deque()

    @property
    def load(self) -> int:
        return len(self.scheduler.requests)

    @property
    def next_at(self) -> float:
        """Return the time at which the oldest launched step is done; infinity if there is none."""
        return self._flights[0][1] if self._flights else float("inf")

    def told(self) -> dict[str, Any]:
        """Return the load that a core reports to routers."""
        scheduler = self.scheduler
        running, waiting = len(scheduler.running), len(scheduler.admitter.waiting)
        return {"num_running": running, "num_waiting": waiting, "kv_usage": scheduler.kv.pool.usage}

    def plan(self) -> tuple[StepPlan, StepShape] | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        reached = self.scheduler.running.num_computed[plan.rows].astype(np.float64)
        is_decode = plan.num_tokens == 1
        pairs = plan.num_tokens * (reached - plan.num_tokens / 2)
        step = StepShape(
            plan.total_tokens,
            len(plan.sampling_rows),
            float(reached[is_decode].sum()),
            float(pairs[~is_decode].sum()),
        )
        return plan, step

    def launch(self, now: float) -> None:
        """Plan as many steps ahead as a core does, each through all stages."""
        while len(self._flights) < self._depth and (planned := self.plan()) is not None:
            plan, step = planned
            arrives = now
            for stage, took_s in enumerate(self.cost.stage_s(step)):
                arrives = self._free_at[stage] = max(arrives, self._free_at[stage]) + took_s
            self._flights.append((plan, arrives))

    def land(self) -> StepOutput:
        return self.finish(self._flights.popleft()[0])

    def finish(self, plan: StepPlan) -> StepOutput:
        return self.scheduler.update(plan, StepResult(np.zeros(len(plan.sampling_rows), np.int32)))


@dataclass(slots=True)
class Watch:
    """Timings seen by clients: the arrival of each request and of its tokens."""

    steady_from: int
    """Number of the first request in steady state; earlier ones are part of the ramp-up."""
    came: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    landed: list[tuple[float, int]] = field(default_factory=list)
    steady_at: float = 0.0
    ends_at: float = 0.0

    def arrive(self, request: Request, now: float) -> None:
        if len(self.came) == self.steady_from:
            self.steady_at = now
        self.came[request.id] = self.ends_at = now

    def see(self, output: StepOutput, now: float) -> None:
        last, steady = self.last, self.steady_at if len(self.came) > self.steady_from else float("inf")
        self.landed.append((now, len(output.request_ids)))
        for id in output.request_ids:
            before = last.get(id)
            last[id] = now
            if self.came[id] < steady:
                continue
            if before is None:
                self.first_s.append(now - self.came[id])
            else:
                self.gaps_s.append(now - before)

    def tokens_s(self) -> float:
        """Return the output tokens per second between the ramp-up and the last arrival, at constant load."""
        within = sum(count for at, count in self.landed if self.steady_at < at <= self.ends_at)
        return within / max(self.ends_at - self.steady_at, 1e-9)


Outputs = list[tuple[SimulatedCore, StepOutput]]
Stepping = Callable[[float, float], tuple[float, Outputs]]
"""Advances from a time until the next event or arrival; returns that time and the outputs."""


def _independent(cores: list[SimulatedCore]) -> Stepping:
    """Step each core independently."""

    def step(now: float, next_arrival: float) -> tuple[float, Outputs]:
        for core in cores:
            core.launch(now)
        first = min(cores, key=lambda core: core.next_at)
        if next_arrival < first.next_at:
            return max(now, next_arrival), []
        return first.next_at, [(first, first.land())]

    return step


def _lockstep(cores: list[SimulatedCore], dp: int) -> Stepping:
    """Step all cores together, for the time of the slowest; the experts process the tokens of all."""

    def step(now: float, next_arrival: float) -> tuple[float, Outputs]:
        planned = [(core, *result) for core in cores if (result := core.plan()) is not None]
        if not planned:
            return max(now, next_arrival), []
        all_tokens = sum(step.num_tokens for _, _, step in planned) * dp / len(cores)
        took_s = max(sum(core.cost.stage_s(step, all_tokens)) for core, _, step in planned)
        return now + took_s, [(core, core.finish(plan)) for core, plan, _ in planned]

    return step


def run(cores: list[SimulatedCore], traffic: Traffic, lockstep_dp: int = 0) -> Watch:
    """Run until all requests are answered. With `lockstep_dp`, the cores represent that many in lockstep."""
    watch = Watch(traffic.concurrency or traffic.num_requests // 5)
    rows = cores[0].scheduler.limits.max_rows
    router = Router(len(cores), block_size=BLOCK_SIZE, max_num_seqs=rows, policy="load")
    coming = traffic.requests()
    due = deque(itertools.islice(coming, traffic.concurrency or 1))
    stepping = _lockstep(cores, lockstep_dp) if lockstep_dp else _independent(cores)
    now = 0.0
    while due or any(core.load for core in cores):
        if not any(core.load for core in cores):
            now = max(now, due[0][0])
        while due and due[0][0] <= now:
            at, request = due.popleft()
            watch.arrive(request, at if traffic.rate else now)
            cores[router.place(request.id, request.tokens, among=range(len(cores)))].scheduler.add(request)
            if traffic.rate:
                due.extend(itertools.islice(coming, 1))
        now, outputs = stepping(now, due[0][0] if due else float("inf"))
        for core, output in outputs:
            watch.see(output, now)
            for id in output.finished:
                router.end(id)
            if traffic.concurrency:
                due.extend(itertools.islice(coming, len(output.finished)))
            router.update_load(cores.index(core), **core.told())
    return watch
