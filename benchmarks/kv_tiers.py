"""Measure the host memory tier of the KV cache on a GPU, with random weights.

    python benchmarks/kv_tiers.py CONFIG_DIR [--budget-s 150]

Prints one line each: the time to the first token of evicted prefixes, against computing them again; the rate
of the copies, against copies of pinned memory; the time between tokens of other streams meanwhile; and with
and without the tier: the time between tokens, the throughput of prompts without any hit, and that of requests
that need more than the cache. The last is also measured with a cache for all of them.
"""

import argparse
import gc
import statistics
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.data.kv_tiers import BlockLoad, LoadDone

FILL = 1.06
"""Tokens that evict all earlier prefixes, as a multiple of the tokens that fit in the KV cache."""


class Bench:
    """An engine with or without the host memory tier of the KV cache, and the copies that it made."""

    def __init__(self, args: argparse.Namespace, *, tier: bool, blocks: int | None = None) -> None:
        self.args = args
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        settings |= {"max_model_len": max(args.prefixes) + 2048, "max_num_seqs": args.requests}
        settings |= {"num_gpu_blocks_override": (blocks or args.blocks) + 1, "disable_log_stats": True}
        size = args.host_gib if tier and not args.dir else 0
        settings |= {"kv_offloading_size": size, "kv_offloading_dir": args.dir if tier else None}
        self.llm = LLM(args.config_dir, **settings)
        self.engine: Any = self.llm.llm_engine
        self.loads: list[tuple[BlockLoad, Future[LoadDone]]] = []
        executor = self.engine.core.executor
        load = executor.load

        def watched(blocks: BlockLoad) -> Future[LoadDone]:
            self.loads.append((blocks, load(blocks)))
            return self.loads[-1][1]

        executor.load = watched
        self.draw = np.random.default_rng(7 + tier)

    def prompt(self, length: int) -> list[int]:
        ids: list[int] = self.draw.integers(10, 90, length).tolist()
        return ids

    def generate_s(self, prompts: list[list[int]], count: int) -> tuple[float, list[int]]:
        """Return the seconds to answer all prompts with `count` tokens, and each prompt's number of cached
        tokens."""
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - began, [output.num_cached_tokens or 0 for output in outputs]

    def evict(self) -> None:
        """Fill the KV cache with other prompts, so that earlier prefixes are evicted."""
        length, left = max(self.args.prefixes) // 2, int(self.args.blocks * 16 * FILL)
        while left > 0:
            self.generate_s([self.prompt(length)], 1)
            left -= length

    def close(self) -> None:
        self.engine.close()
        self.loads.clear()
        del self.engine, self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def pinned_rate() -> float:
    """Return the bytes per second of a copy from pinned host memory to the GPU."""
    if not torch.cuda.is_available():
        return float("nan")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return len(host) / min(times)


def measure_first_tokens(bench: Bench, prefixes: list[list[int]]) -> None:
    cold: dict[int, list[float]] = {}
    warm: dict[int, list[float]] = {}
    for prefix in prefixes:
        cold.setdefault(len(prefix), []).append(bench.generate_s([bench.prompt(len(prefix) + 16)], 1)[0])
        seconds, cached = bench.generate_s([prefix + bench.prompt(16)], 1)
        if cached[0] < len(prefix) - 16:
            print(f"  {len(prefix)} tokens: only {cached[0]} were cached", flush=True)
        else:
            warm.setdefault(len(prefix), []).append(seconds)
    parts = []
    for length, seconds_of in cold.items():
        compute_ms = 1e3 * statistics.median(seconds_of)
        hit_ms = 1e3 * statistics.median(warm[length]) if length in warm else float("nan")
        parts.append(f"{length} tokens {hit_ms:.1f} ms / {compute_ms:.1f} ms = {compute_ms / hit_ms:.1f}x")
    print("1 first token, from the tier / computed:", "; ".join(parts), flush=True)


def print_copies(bench: Bench, block_bytes: int) -> None:
    """Print the bytes per second of the largest copies from host memory to the GPU; a KV block has
    `block_bytes`."""
    done = [(len(load.keys) * block_bytes, coming.result().seconds) for load, coming in bench.loads]
    largest = [(size, seconds) for size, seconds in done if size == max(size for size, _ in done)]
    rate = max((size / seconds for size, seconds in largest), default=float("nan"))
    pinned = pinned_rate()
    num_bytes = largest[0][0] if largest else 0
    print(
        f"2 copies of {num_bytes / 1e9:.2f} GB: {rate / 1e9:.1f} GB/s of {pinned / 1e9:.1f} GB/s from pinned"
        f" memory = {100 * rate / pinned:.0f} %; {len(done)} copies",
        flush=True,
    )


def gaps_ms(bench: Bench, prompts: list[list[int]], *, steps: int, name: str) -> str:
    """Run steps of the streams while a prompt arrives at regular steps; return the times between tokens."""
    engine, times, gaps, pending = bench.engine, time.perf_counter(), list[float](), set[str]()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    arrivals = {(at + 1) * steps // (len(prompts) + 1): at for at in range(len(prompts))}
    step = 0
    while step < steps or pending:
        if step in arrivals:
            id = f"{name}{arrivals.pop(step)}"
            engine.add_request(id, {"prompt_token_ids": prompts[int(id[len(name) :])]}, params)
            pending.add(id)
        outputs = engine.step()
        pending -= {output.request_id for output in outputs if output.finished}
        if any(output.request_id.startswith("stream") for output in outputs):
            now = time.perf_counter()
            gaps.append(1e3 * (now - times))
            times, step = now, step + 1
    gaps = gaps[5:]
    low, high = np.percentile(gaps, [50, 99])
    return f"{name} {low:.1f} / {high:.1f} / {max(gaps):.1f}"


def start_streams(bench: Bench) -> None:
    args = bench.args
    params = SamplingParams(
        temperature=0, max_tokens=max(args.prefixes) + 1000, ignore_eos=True, detokenize=False
    )
    for number in range(args.streams):
        bench.engine.add_request(f"stream{number}", {"prompt_token_ids": bench.prompt(64)}, params)
    for _ in range(20):
        bench.engine.step()


def end_streams(bench: Bench) -> None:
    for number in range(bench.args.streams):
        bench.engine.abort_request([f"stream{number}"])
    while bench.engine.has_unfinished_requests():
        bench.engine.step()


def measure_streams(bench: Bench, prefixes: list[list[int]]) -> None:
    args = bench.args
    start_streams(bench)
    parts = [gaps_ms(bench, [], steps=args.steps, name="alone")]
    num_before = len(bench.loads)
    hits = [prefix + bench.prompt(16) for prefix in prefixes]
    parts.append(gaps_ms(bench, hits, steps=args.steps, name="copies"))
    num_loads = len(bench.loads) - num_before
    cold = [bench.prompt(len(prefix) + 16) for prefix in prefixes]
    parts.append(gaps_ms(bench, cold, steps=args.steps, name="computing"))
    end_streams(bench)
    print(
        f"3 ms between tokens of {args.streams} streams (median / p99 / longest): {'; '.join(parts)};"
        f" {num_loads} copies",
        flush=True,
    )


def measure_plain(bench: Bench) -> tuple[float, str]:
    """Return tokens per second of prompts without hits, a median of three, and the times between tokens of
    streams."""
    length, rates = bench.args.blocks * 16 * 2 // bench.args.requests, list[float]()
    for _ in range(3):
        seconds, _ = bench.generate_s([bench.prompt(length) for _ in range(bench.args.requests)], 64)
        rates.append(bench.args.requests * (length + 64) / seconds)
    start_streams(bench)
    gaps = gaps_ms(bench, [], steps=2 * bench.args.steps, name="")
    end_streams(bench)
    return statistics.median(rates), f"{gaps} ms ({min(rates):.0f} to {max(rates):.0f} tokens/s)"


def measure_small_cache(bench: Bench) -> tuple[float, int]:
    """Return output tokens per second of requests that need 1 / 0.6 of the cache, and their preemptions."""
    before = bench.engine.core.scheduler.num_preemptions
    half = int(bench.args.blocks * 16 / 0.6 / bench.args.requests / 2)
    seconds, _ = bench.generate_s([bench.prompt(half) for _ in range(bench.args.requests)], half)
    return bench.args.requests * half / seconds, bench.engine.core.scheduler.num_preemptions - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_dir")
    parser.add_argument("--blocks", type=int, default=9830, help="blocks of 16 tokens in the cache")
    parser.add_argument("--host-gib", type=float, default=64.0)
    parser.add_argument("--dir", help="measure a tier on disk instead")
    parser.add_argument("--prefixes", default="2048,8192,32768")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--budget-s", type=float, default=150.0, help="later parts are left out after it")
    args = parser.parse_args()
    args.prefixes = [int(length) for length in args.prefixes.split(",")]
    until = time.monotonic() + args.budget_s

    bench = Bench(args, tier=True)
    print(f"0 started after {args.budget_s - until + time.monotonic():.0f} s", flush=True)
    block_bytes = sum(pages for pages, _ in bench.engine.core.executor.call("describe_tiers"))
    first = [bench.prompt(length) for length in args.prefixes for _ in range(2)]
    later = [bench.prompt(length) for length in (args.prefixes[1], args.prefixes[-1], args.prefixes[1])]
    for prefix in (*first, *later):
        bench.generate_s([prefix], 1)
    bench.evict()
    print(f"0 evicted after {args.budget_s - until + time.monotonic():.0f} s", flush=True)
    measure_first_tokens(bench, first)
    print_copies(bench, block_bytes)
    measure_streams(bench, later)
    tier, small_tier = measure_plain(bench), measure_small_cache(bench)
    print(f"0 with the tier after {args.budget_s - until + time.monotonic():.0f} s", flush=True)
    bench.close()

    bench = Bench(args, tier=False)
    bench.generate_s([bench.prompt(1000)], 2)
    plain, small = measure_plain(bench), measure_small_cache(bench)
    bench.close()
    print(
        f"4 prompts without a hit: {tier[0]:.0f} tokens/s with the tier, {plain[0]:.0f} without ="
        f" {tier[0] / plain[0]:.3f}x; between tokens{tier[1]}, without{plain[1]}",
        flush=True,
    )
    if time.monotonic() > until - 30:
        print("5 a small cache: left out, the time is over", flush=True)
        return
    bench = Bench(args, tier=False, blocks=int(args.blocks / 0.6) + args.requests)
    bench.generate_s([bench.prompt(1000)], 2)
    full = measure_small_cache(bench)
    bench.close()
    print(
        f"5 a cache for 60 % of the tokens: {small_tier[0]:.0f} tokens/s with the tier ({small_tier[1]}"
        f" preemptions), {small[0]:.0f} without ({small[1]}); with a cache for all {full[0]:.0f} ({full[1]})",
        flush=True,
    )


if __name__ == "__main__":
    main()
