"""`python -m quire.bench.gpu`: benchmarks an engine with random weights on one GPU; prints JSON lines.

It measures startup, decode steps by batch size, prefill and offline throughput. The lines name their
workload, so that results of another engine on the same machine can be compared."""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM

WORKLOADS = ("decode", "prefill", "offline")
DECODE_PROMPT, DECODE_STEPS = 512, 128
PREFILL_PROMPTS, PREFILL_LEN = 16, 2048
OFFLINE_REQUESTS, SHORTEST, LONGEST = 256, 100, 1024
VOCAB = 10000
REPEATS = 3


def parser() -> FlagParser:
    flags = FlagParser(prog="python -m quire.bench.gpu", description=__doc__)
    flags.add_argument("--config-dir", required=True, metavar="DIR", help="Folder with a config.json.")
    flags.add_argument("--batch-sizes", default="1,8,32,128,256", help="Batch sizes of decode steps.")
    flags.add_argument("--workloads", default=",".join(WORKLOADS), help="Which of: decode, prefill, offline.")
    flags.add_argument("--trace", metavar="FILE", help="Also write a profiler trace of decode steps.")
    add_engine_flags(flags)
    return flags


def main(argv: list[str] | None = None, *, began: float | None = None) -> int:
    args = parser().parse_args(argv)
    began = process_start() if began is None else began
    llm, name = open_engine(args), Path(args.config_dir).resolve().name
    print_result("startup", name, seconds=time.time() - began)
    workloads = args.workloads.split(",")
    if "decode" in workloads:
        for batch in (int(size) for size in args.batch_sizes.split(",")):
            print_result("decode", name, batch=batch, ms=1000 * decode_step(llm, batch))
    if "prefill" in workloads:
        print_result("prefill", name, tok_s=prefill_rate(llm))
    if "offline" in workloads:
        print_result("offline", name, **offline(llm))
    if args.trace:
        print_result("trace", name, **trace(llm, args.trace))
    return 0


def open_engine(args: argparse.Namespace) -> LLM:
    """Open the engine and generate a first token."""
    settings = {
        "model": args.config_dir,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "disable_log_stats": True,
    }
    llm = LLM(**(settings | engine_args_from(args)))
    generate(llm, [[1, 2, 3]], 1)
    return llm


def print_result(workload: str, model: str, **figures: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"workload": workload, "model": model, **rounded}), flush=True)


def process_start() -> float:
    """Return the time at which this process was started, in seconds since 1970."""
    import psutil

    return psutil.Process().create_time()


def generate(llm: LLM, prompts: list[list[int]], length: int | list[int], temperature: float = 0.0) -> float:
    """Generate tokens for all prompts and return the seconds taken."""
    lengths = [length] * len(prompts) if isinstance(length, int) else length
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for max_tokens in lengths
    ]
    with no_collections():
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
    num_generated = [len(output.outputs[0].token_ids) for output in outputs]
    assert num_generated == lengths, f"expected {lengths} tokens, got {num_generated}"
    return took


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prompts_of(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randint(0, VOCAB) for _ in range(length)] for _ in range(count)]


def decode_step(llm: LLM, batch: int) -> float:
    """Return the seconds of one step: the time of 128 tokens minus that of one, per step."""
    rng, times = random.Random(batch), []
    generate(llm, prompts_of(rng, batch, DECODE_PROMPT), 4)
    for _ in range(REPEATS):
        prompts = prompts_of(rng, batch, DECODE_PROMPT)
        one = generate(llm, prompts, 1)
        all_steps = generate(llm, prompts, DECODE_STEPS)
        times.append((all_steps - one) / (DECODE_STEPS - 1))
    return statistics.median(times)


def prefill_rate(llm: LLM) -> float:
    """Return the prompt tokens per second that the engine computes."""
    rng = random.Random(1)
    generate(llm, prompts_of(rng, PREFILL_PROMPTS, PREFILL_LEN), 1)
    took = [generate(llm, prompts_of(rng, PREFILL_PROMPTS, PREFILL_LEN), 1) for _ in range(REPEATS)]
    return PREFILL_PROMPTS * PREFILL_LEN / statistics.median(took)


def offline(llm: LLM) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, VOCAB) for _ in range(rng.randint(SHORTEST, LONGEST))]
        for _ in range(OFFLINE_REQUESTS)
    ]
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(OFFLINE_REQUESTS)]
    took = generate(llm, prompts, lengths, temperature=0.6)
    return {
        "tokens_in": sum(map(len, prompts)),
        "tokens_out": sum(lengths),
        "seconds": took,
        "out_tok_s": sum(lengths) / took,
    }


def trace(llm: LLM, path: str, batch: int = 256, steps: int = 128) -> dict[str, Any]:
    """Profile decode steps of `batch` sequences into the file `path`; return the batch size and the
    percentage of idle GPU time while all sequences decode."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    prompts = prompts_of(random.Random(2), batch, DECODE_PROMPT)
    generate(llm, prompts, 4)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        generate(llm, prompts, steps)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    return {"batch": batch, "idle_percent": 100 * idle_share(path)}


def idle_share(path: str) -> float:
    """Return the share of time (0 to 1) without a GPU kernel or copy, in the third quarter of the profiler
    trace `path`: after the prompts and before the first sequence ends."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans: list[tuple[float, float]] = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds
    )
    spans = spans[len(spans) // 2 : 3 * len(spans) // 4]
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1.0 - busy / (end - spans[0][0])


if __name__ == "__main__":
    sys.exit(main())
