"""`python -m quire.bench.slo`: latency targets against static step sizes, on the scheduler with simulated
time.

Steps take as long as a linear model of a GPU says, with noise, which the scheduler does not know. Short and
long prompts arrive at random at a part of the capacity. A request is good if its first token and its mean
time per output token keep their targets."""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from quire.data.latency_target import LatencyTarget
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepPlan, StepResult
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler
from quire.sched.targets import Targets

_MAX_LEN = 262_144
_ROWS = 256
_GRAPH_TOKENS = 1024
"""Prompt tokens of the largest step that is captured as a CUDA graph."""


class SimulatedGpu(NamedTuple):
    """Cost model of a GPU. `costs` are seconds: per step, per decoding request, per token of the contexts
    of those requests, per step with prompt tokens, per prompt token, and per pair of a prompt token and a
    token before it."""

    costs: tuple[float, ...]
    start_s: float
    """Least seconds of attention for a chunk of a prompt, per token before the chunk."""
    eager_s: float
    """Least seconds of a step that is too large for a CUDA graph: the host needs them to launch its
    kernels."""
    ttft_s: float
    """Latency target of the first token after short prompts, in seconds."""
    long_ttft_s: float
    """Latency target of the first token after long prompts, in seconds."""
    itl_s: float

    def seconds(self, plan: StepPlan, starts: np.ndarray, noise: float) -> float:
        is_decode = plan.num_tokens == 1
        chunks = plan.num_tokens[~is_decode].astype(float)
        before = starts[~is_decode]
        pairs = float((chunks * (before + chunks / 2)).sum())
        terms = (1.0, is_decode.sum(), starts[is_decode].sum(), bool(len(chunks)), chunks.sum(), pairs)
        shortest_s = self.start_s * float(before.max(initial=0))
        seconds = float(np.dot(terms, self.costs)) + max(0.0, shortest_s - pairs * self.costs[5])
        return max(seconds, self.eager_s if chunks.sum() > _GRAPH_TOKENS else 0.0) * noise


DEVICES = {
    "0.6B": SimulatedGpu((0.70e-3, 12e-6, 30e-9, 0.8e-3, 2.4e-6, 460e-12), 0.05e-6, 0.011, 0.2, 2.0, 0.010),
    "8B": SimulatedGpu((3.9e-3, 22e-6, 34e-9, 1.5e-3, 22.5e-6, 950e-12), 0.09e-6, 0.011, 0.5, 4.0, 0.030),
}
"""Costs near those of an H200: docs/performance.md."""


@dataclass
class SimulatedRequest:
    """A request of the simulation, with its times in simulated seconds."""

    arrives_at: float
    num_in: int
    num_out: int
    ttft_s: float
    token_times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.token_times)

    def is_good(self, itl_s: float) -> bool:
        if len(self.token_times) < self.num_out:
            return False
        first_s = self.token_times[0] - self.arrives_at
        return first_s <= self.ttft_s and (len(self.gaps) == 0 or float(self.gaps.mean()) <= itl_s)


class Clock:
    """Clock of the simulation, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with patch("time.monotonic", lambda: self.now):
            yield


def make_jobs(
    device: SimulatedGpu, rate: float, seconds: float, long_share: float, seed: int = 0
) -> list[SimulatedRequest]:
    """Return requests that arrive at random, `rate` per second: prompts of 200 tokens, and a share of
    32,768."""
    draw, now, jobs = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        is_long = draw.random() < long_share
        ttft_s = device.long_ttft_s if is_long else device.ttft_s
        jobs.append(SimulatedRequest(now, 32_768 if is_long else 200, draw.randint(100, 300), ttft_s))
    return jobs


def simulate(
    device: SimulatedGpu,
    jobs: Sequence[SimulatedRequest],
    *,
    max_tokens: int,
    targets: bool,
    num_slow: int = 0,
) -> float:
    """Run the requests on a simulated device, and fill in the times of their tokens; return the simulated
    seconds until the last. `max_tokens` limits a step; `targets` switches on latency targets. The first
    `num_slow` steps take up to a second more, as if kernels were compiled."""
    clock, noise, num_steps = Clock(), random.Random(1), 0
    with clock.installed():
        kv = KVManager(num_blocks=400_000, block_size=16, max_rows=_ROWS, share_prefixes=False)
        scheduler = Scheduler(
            kv=kv,
            max_num_seqs=_ROWS,
            max_num_batched_tokens=max_tokens,
            max_model_len=_MAX_LEN,
            targets=Targets() if targets else None,
        )
        arriving = sorted(range(len(jobs)), key=lambda number: -jobs[number].arrives_at)
        while arriving or scheduler.has_work:
            if not scheduler.has_work:
                clock.now = max(clock.now, jobs[arriving[-1]].arrives_at)
            while arriving and jobs[arriving[-1]].arrives_at <= clock.now:
                number = arriving.pop()
                scheduler.add(to_request(number, jobs[number], device if targets else None))
            plan = scheduler.plan()
            assert plan is not None
            flight = scheduler.in_flight[-1]
            flight.made_at = clock.now
            clock.now += device.seconds(plan, flight.starts, 1 + 0.1 * noise.random())
            clock.now += noise.random() if num_steps < num_slow else 0.0
            num_steps += 1
            count = int(plan.samples.sum())
            output = scheduler.update(plan, StepResult(token_ids=np.full(count, 7, np.int32)))
            for id in output.request_ids:
                jobs[int(id)].token_times.append(clock.now)
        return clock.now


def to_request(number: int, job: SimulatedRequest, device: SimulatedGpu | None) -> Request:
    """Return the request for a scheduler; without a device, it has no latency targets."""
    request = Request(
        id=str(number),
        tokens=[5] * job.num_in,
        params=SamplingParams(max_tokens=job.num_out, ignore_eos=True),
        prompt_len=job.num_in,
        limit=job.num_in + job.num_out,
        seed=number,
    )
    if device is not None:
        request.target = LatencyTarget(job.ttft_s, device.itl_s)
    request.queued_at = job.arrives_at
    return request


def capacity(device: SimulatedGpu, long_share: float) -> float:
    """Return the requests per second that the device finishes if all requests wait from the start."""
    jobs = make_jobs(device, 400.0, 2.0, long_share)
    for job in jobs:
        job.arrives_at = 1e-6
    return len(jobs) / simulate(device, jobs, max_tokens=8192, targets=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", nargs="+", choices=[*DEVICES], default=[*DEVICES])
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.1])
    parser.add_argument("--static", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--long-share", type=float, default=0.05, help="share of prompts of 32,768 tokens")
    parser.add_argument("--itl-ms", type=float, help="target between tokens; default: that of the GPU below")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    for name in args.device:
        device = DEVICES[name]
        if args.itl_ms is not None:
            device = device._replace(itl_s=args.itl_ms / 1e3)
        top = capacity(device, args.long_share)
        ttft_ms, long_ms, itl_ms = (1e3 * s for s in (device.ttft_s, device.long_ttft_s, device.itl_s))
        print(
            f"{name}: {top:.1f} requests/s at capacity, {args.long_share:.0%} of 32,768 tokens; targets: "
            f"first token {ttft_ms:g} ms (long prompts {long_ms:g} ms), ITL {itl_ms:g} ms"
        )
        print(f"{'load':>5} {'tokens':>8} {'good':>7} {'good/s':>7}", end=" ")
        print(f"{'TTFT p50, p99 (short)':>22} {'ITL p50, p99':>16}")
        for load in args.load:
            for tokens in [*args.static, 0]:
                jobs = make_jobs(device, load * top, args.seconds, args.long_share)
                ended = simulate(device, jobs, max_tokens=tokens or 16384, targets=not tokens)
                print(
                    f"{load:5.1f} {tokens or 'targets':>8} {result_row(jobs, ended, device.itl_s)}",
                    flush=True,
                )


def result_row(jobs: Sequence[SimulatedRequest], seconds: float, itl_s: float) -> str:
    """Return the columns of a table: the share of requests that met their targets, the number of these per
    second of the run, and p50 and p99 of TTFT (short prompts) and of ITL. `itl_s` is the ITL target."""
    num_good = sum(job.is_good(itl_s) for job in jobs)
    firsts = [(job.token_times or [math.inf])[0] - job.arrives_at for job in jobs if job.num_in < 1000]
    first = 1e3 * np.percentile(firsts, (50, 99), method="nearest")
    between = np.percentile(1e3 * np.concatenate([job.gaps for job in jobs]), (50, 99))
    return (
        f"{num_good / len(jobs):7.1%} {num_good / seconds:7.1f} {first[0]:13,.0f} {first[1]:8,.0f} "
        f"{between[0]:8.1f} {between[1]:7.1f}"
    )


if __name__ == "__main__":
    main()
