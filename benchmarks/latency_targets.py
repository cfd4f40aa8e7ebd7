"""Measure latency targets against static step sizes, on a real engine with random weights.

    python benchmarks/latency_targets.py CONFIG_DIR [--static 2048 8192 16384] [--load 0.5 0.7 0.9 1.1]

The requests and the columns are those of `python -m quire.bench.slo`, which simulates the device. Requests
that are unfinished when the time is over are not good. With `--long-prompt N`, one prompt of N tokens then
arrives beside 32 streams.
"""

import argparse
import itertools
import time

import numpy as np

from quire import LLM
from quire.bench.slo import DEVICES, SimulatedGpu, SimulatedRequest, make_jobs, result_row, to_request
from quire.core.engine_core import EngineCore
from quire.sched.admission_checks import ReadyQueue
from quire.sched.queues import open_queue
from quire.sched.targets import Targets

NUM_STREAMED = 4000
"""Tokens of each stream beside a long prompt."""
DRAIN_S = 3.0
"""Seconds after the last arrival in which requests may still finish."""
NUMBERS = itertools.count()
"""Numbers of requests, which are also their tokens' first value, so that no two share a prefix."""


class Engine:
    """An engine with latency targets that can be switched off, and a variable limit on the tokens of a
    step."""

    def __init__(self, config_dir: str, most_tokens: int, max_len: int) -> None:
        self.llm = LLM(
            config_dir,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max_len,
            max_num_batched_tokens=most_tokens,
            max_num_seqs=256,
            slo_ttft_ms=1000.0,
            disable_log_stats=True,
        )
        self.core: EngineCore = self.llm.llm_engine.core  # type: ignore[attr-defined]
        self.targets: Targets | None = self.core.scheduler.admitter.targets
        self.most_tokens = most_tokens

    def use(self, max_tokens: int | None) -> None:
        """Limit steps to `max_tokens` without targets; None: use targets."""
        scheduler = self.core.scheduler
        admitter, limits = scheduler.admitter, scheduler.limits
        admitter.targets = self.targets if max_tokens is None else None
        queue = open_queue("fcfs", None, admitter.targets)
        admitter.waiting = ReadyQueue(queue, scheduler.checks)
        limits.max_tokens = limits.longest_chunk = max_tokens or self.most_tokens
        limits._settings = (limits.max_rows, limits.max_tokens)
        limits.paced_tokens = None

    def run(
        self, jobs: list[SimulatedRequest], device: SimulatedGpu | None, seconds: float = float("inf")
    ) -> float:
        """Run the requests and fill in the times of their tokens; return the seconds that this took."""
        arriving = sorted(jobs, key=lambda job: -job.arrives_at)
        by_id: dict[str, SimulatedRequest] = {}
        began = time.monotonic()
        while (arriving or self.core.has_work) and time.monotonic() - began < seconds:
            if not self.core.has_work:
                time.sleep(max(0.0, began + arriving[-1].arrives_at - time.monotonic()))
            while arriving and began + arriving[-1].arrives_at <= time.monotonic():
                job = arriving.pop()
                request = to_request(next(NUMBERS), job, device)
                request.queued_at = began + job.arrives_at
                by_id[request.id] = job
                self.core.add(request)
            output = self.core.step()
            if output is not None:
                for id in output.request_ids:
                    by_id[str(id)].token_times.append(output.at - began)
        ended = time.monotonic() - began
        self.core.abort(list(by_id))
        while self.core.has_work:
            self.core.step()
        return ended


def gaps_of_streams(engine: Engine, long: SimulatedRequest | None, itl_s: float | None) -> np.ndarray:
    """Run 32 streams, beside a long prompt if there is one. Return the times at which their tokens arrived
    and the seconds since the token before, [streams, tokens, 2]; NaN for tokens that are missing."""
    streams = [SimulatedRequest(0.0, 200, NUM_STREAMED, 1.0) for _ in range(32)]
    device = None if itl_s is None else SimulatedGpu((), 0.0, 0.0, 1.0, 60.0, itl_s)
    engine.run([*streams, *([long] if long else [])], device, 60.0)
    times = np.full((len(streams), NUM_STREAMED), np.nan)
    for job, row in zip(streams, times, strict=True):
        row[: len(job.token_times)] = job.token_times
    return np.stack((times[:, 1:], np.diff(times)), axis=2)


def beside_a_long_prompt(engine: Engine, length: int, alone_s: np.ndarray, itl_s: float | None) -> str:
    """Return a line that compares the time between tokens of 32 streams beside a long prompt with that alone,
    at the same lengths: `alone_s` by number of the token."""
    long = SimulatedRequest(1.0, length, 1, 60.0)
    times, gaps = np.moveaxis(gaps_of_streams(engine, long, itl_s), 2, 0)
    first_s = long.token_times[0] if long.token_times else 60.0
    is_beside = (times > 1.0) & (times < first_s)
    same, beside = np.broadcast_to(alone_s, gaps.shape)[is_beside], gaps[is_beside]
    return (
        f"mean {1e3 * beside.mean():.2f} ms between tokens, p99 {1e3 * np.percentile(beside, 99):.2f}; "
        f"alone, at the same lengths, {1e3 * same.mean():.2f}; {same.mean() / beside.mean():.0%} of that "
        f"rate; first token of the prompt after "
        f"{first_s - 1.0:.1f} s{'' if long.token_times else ' (not within the time)'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_dir")
    parser.add_argument("--targets-of", choices=[*DEVICES], default="0.6B", help="targets of the simulation")
    parser.add_argument("--static", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.1])
    parser.add_argument("--itl-ms", type=float, nargs="+", help="further targets between tokens, at load 0.5")
    parser.add_argument("--long-share", type=float, default=0.05, help="share of prompts of --long-len")
    parser.add_argument("--long-len", type=int, default=32_768)
    parser.add_argument("--long-prompt", type=int, help="tokens of a prompt beside 32 streams")
    parser.add_argument("--seconds", type=float, default=12.0)
    args = parser.parse_args()
    device = DEVICES[args.targets_of]
    most = max(args.static)
    engine = Engine(args.config_dir, most, max(args.long_len, args.long_prompt or 0) + 4500)

    def jobs_of(rate: float, seconds: float) -> list[SimulatedRequest]:
        jobs = make_jobs(device, rate, seconds, args.long_share)
        for job in jobs:
            job.num_in = args.long_len if job.num_in > 1000 else job.num_in
        return jobs

    for setting in (None, *args.static, most):  # the first runs compile kernels and learn the costs of steps
        jobs = jobs_of(100.0, 2.0)
        for job in jobs:
            job.arrives_at = 0.0
        engine.use(setting)
        top = len(jobs) / engine.run(jobs, None if setting else device)
    print(f"{top:.1f} requests/s at capacity; ITL target {1e3 * device.itl_s:g} ms", flush=True)
    print(f"{'load':>5} {'tokens':>8} {'good':>7} {'good/s':>7} {'TTFT p50, p99':>22} {'ITL p50, p99':>16}")
    settings = [(load, tokens, device) for load in args.load for tokens in [*args.static, None]]
    settings += [(0.5, None, device._replace(itl_s=itl_ms / 1e3)) for itl_ms in args.itl_ms or []]
    for load, tokens, targets in settings:
        jobs = jobs_of(load * top, args.seconds)
        engine.use(tokens)
        ended = engine.run(jobs, None if tokens else targets, args.seconds + DRAIN_S)
        label = tokens or ("targets" if targets is device else f"{1e3 * targets.itl_s:g} ms")
        print(f"{load:5.1f} {label:>8} {result_row(jobs, ended, targets.itl_s)}", flush=True)
    if args.long_prompt:
        engine.use(most)
        alone_s = np.nanmean(gaps_of_streams(engine, None, None)[:, :, 1], axis=0)
        itl_s = 2 * float(alone_s.mean())
        for setting in (most, None):
            engine.use(setting)
            label = setting or f"targets, {1e3 * itl_s:.1f} ms"
            line = beside_a_long_prompt(engine, args.long_prompt, alone_s, None if setting else itl_s)
            print(f"{args.long_prompt} tokens beside 32 streams, {label}: {line}", flush=True)


if __name__ == "__main__":
    main()
