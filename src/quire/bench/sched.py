"""`python -m quire.bench.sched`: measures scheduling without a model, and unused slots of the KV cache."""

import argparse
import itertools
import random
import time
from collections import deque

import numpy as np

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepPlan, StepResult
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler


def make_scheduler(
    num_running: int, *, prefix_caching: bool, max_len: int = 8192, windows: tuple[int | None, ...] = (None,)
) -> Scheduler:
    kv = KVManager(
        num_blocks=num_running * 160 * len(windows),
        block_size=16,
        max_rows=num_running,
        share_prefixes=prefix_caching,
        windows=windows,
    )
    return Scheduler(kv=kv, max_num_seqs=num_running, max_num_batched_tokens=16384, max_model_len=max_len)


def add_requests(scheduler: Scheduler, lengths: list[tuple[int, int]]) -> None:
    draw = random.Random(0)
    for number, (num_in, num_out) in enumerate(lengths):
        scheduler.add(
            Request(
                id=str(number),
                tokens=[draw.randrange(50_000) for _ in range(num_in)],
                params=SamplingParams(max_tokens=num_out, ignore_eos=True),
                prompt_len=num_in,
                limit=num_in + num_out,
                seed=number,
            )
        )


def measure(
    num_running: int,
    num_steps: int,
    *,
    prefix_caching: bool,
    depth: int = 1,
    windows: tuple[int | None, ...] = (None,),
) -> np.ndarray:
    """Return the seconds of the scheduler's plan() and update() in each step in which all requests decode,
    as [steps, 2]. With a `depth` of 2 the next step is planned before the last one is updated."""
    scheduler = make_scheduler(num_running, prefix_caching=prefix_caching, windows=windows)
    draw = random.Random(1)
    add_requests(scheduler, [(draw.randint(100, 1024), 2 * num_steps) for _ in range(num_running)])
    tokens = np.random.default_rng(0)
    times: list[tuple[float, float]] = []
    in_flight: deque[tuple[StepPlan, float]] = deque()
    while len(times) < num_steps:
        while len(in_flight) < depth:
            begin = time.perf_counter()
            planned = scheduler.plan()
            assert planned is not None
            in_flight.append((planned, time.perf_counter() - begin))
        plan, plan_s = in_flight.popleft()
        result = StepResult(token_ids=tokens.integers(0, 50_000, int(plan.samples.sum()), dtype=np.int32))
        begin = time.perf_counter()
        scheduler.update(plan, result)
        if plan.total_tokens == num_running == len(plan.rows):
            times.append((plan_s, time.perf_counter() - begin))
    return np.array(times)


def measure_waste(num_requests: int = 512) -> float:
    """Return the share of allocated KV cache slots without a token, over a run with ShareGPT-like lengths.

    Lengths are log-normal, with the means and spreads of ShareGPT in the PagedAttention paper: 161 in, 338
    out."""
    scheduler = make_scheduler(256, prefix_caching=True)
    draw = np.random.default_rng(0)
    num_in = np.clip(draw.lognormal(4.3, 1.2, num_requests), 4, 1024).astype(int).tolist()
    num_out = np.clip(draw.lognormal(5.4, 0.9, num_requests), 4, 1024).astype(int).tolist()
    add_requests(scheduler, list(zip(num_in, num_out, strict=True)))
    held = used = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        rows = scheduler.running.order
        held += int(scheduler.kv.capacity[rows].sum())
        used += int(scheduler.running.num_computed[rows].sum())
        scheduler.update(
            plan, StepResult(token_ids=draw.integers(0, 50_000, int(plan.samples.sum()), dtype=np.int32))
        )
    return 1 - used / held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--num-running",
        type=int,
        nargs="+",
        default=[256, 1024],
        help="requests that decode in every step; one table each",
    )
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument(
        "--windows",
        type=int,
        nargs="+",
        default=[0],
        help="attention window of each group of layers in tokens; 0: none",
    )
    args = parser.parse_args()
    windows = tuple(window or None for window in args.windows)
    for num_running in args.num_running:
        print(f"{num_running} running requests, {args.num_steps} decode steps; median milliseconds per step")
        print(f"{'overlapped':>10} {'prefix caching':>14} {'plan':>8} {'update':>8} {'both':>8} {'p99':>8}")
        for depth, prefix_caching in itertools.product((1, 2), (True, False)):
            times = 1e3 * measure(
                num_running, args.num_steps, prefix_caching=prefix_caching, depth=depth, windows=windows
            )
            both = times.sum(axis=1)
            print(
                f"{'yes' if depth > 1 else 'no':>10} {'on' if prefix_caching else 'off':>14} "
                f"{np.median(times[:, 0]):8.3f} {np.median(times[:, 1]):8.3f} {np.median(both):8.3f} "
                f"{np.percentile(both, 99):8.3f}"
            )
    print(
        f"KV cache waste on a ShareGPT-like mix: {measure_waste():.2%} of the allocated slots hold no token"
    )


if __name__ == "__main__":
    main()
