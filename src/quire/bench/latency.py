"""`quire bench latency`: the latency of one batch, measured repeatedly."""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from quire.bench.datasets import random_samples
from quire.bench.report import PERCENTILES
from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.data.params import BeamSearchParams, SamplingParams
from quire.entrypoints.llm import LLM


def add_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Benchmark", "The workload to measure.")
    group.add_argument("--input-len", type=int, default=32, help="Prompt tokens.")
    group.add_argument("--output-len", type=int, default=128, help="Tokens generated.")
    group.add_argument("--batch-size", type=int, default=8, help="Requests in the batch.")
    group.add_argument("--n", type=int, default=1, help="Sequences per request.")
    group.add_argument("--use-beam-search", action="store_true", help="Beam search of width n.")
    group.add_argument("--num-iters-warmup", type=int, default=10, help="Runs that are not counted.")
    group.add_argument("--num-iters", type=int, default=30, help="Runs that are counted.")
    group.add_argument("--disable-detokenize", action="store_true", help="Do not detokenize.")
    group.add_argument("--output-json", help="File to write the result to.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    llm = LLM(**({"enable_prefix_caching": False} | engine_args_from(args)))
    samples = random_samples(
        args.batch_size,
        vocab=llm.config.checkpoint.facts.vocab,
        input_len=args.input_len,
        output_len=args.output_len,
    )
    prompts = [sample.prompt_ids for sample in samples]
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    beam = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)

    def once() -> float:
        start = time.perf_counter()
        if args.use_beam_search:
            llm.beam_search(prompts, beam)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for _ in tqdm(range(args.num_iters_warmup), desc="Warmup iterations"):
        once()
    latencies = np.array([once() for _ in tqdm(range(args.num_iters), desc="Bench iterations")])
    percentiles = dict(zip(PERCENTILES, np.percentile(latencies, PERCENTILES).tolist(), strict=True))
    print(f"Avg latency: {latencies.mean()} seconds")
    for percent, seconds in percentiles.items():
        print(f"{percent}% percentile latency: {seconds} seconds")
    if args.output_json:
        result = {
            "avg_latency": latencies.mean(),
            "latencies": latencies.tolist(),
            "percentiles": percentiles,
        }
        Path(args.output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0
