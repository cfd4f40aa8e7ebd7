"""`quire bench throughput`: requests and tokens per second with all requests queued at once."""

import argparse
import json
import time
from pathlib import Path

from quire.bench.datasets import Sample, random_samples, sharegpt_samples
from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM
from quire.errors import ConfigError


def add_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Benchmark", "The workload to measure.")
    group.add_argument(
        "--dataset-name", choices=("random", "sharegpt"), default="random", help="Kind of prompts."
    )
    group.add_argument("--dataset-path", help="JSON file of the sharegpt dataset.")
    group.add_argument("--num-prompts", type=int, default=1000, help="Requests to run.")
    group.add_argument("--input-len", type=int, default=128, help="Prompt tokens of a random request.")
    group.add_argument(
        "--output-len", type=int, help="Tokens generated for each. Default: 128, or the dataset's."
    )
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="Spread of the lengths, 0 to 1.")
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="Prompt tokens common to all requests."
    )
    group.add_argument("--n", type=int, default=1, help="Sequences per request.")
    group.add_argument("--output-json", help="File to write the result to.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    llm = LLM(**engine_args_from(args))
    samples = _samples(args, llm)
    params = [
        SamplingParams(
            n=args.n, temperature=1.0, ignore_eos=True, max_tokens=sample.output_len, detokenize=False
        )
        for sample in samples
    ]
    start = time.perf_counter()
    outputs = llm.generate([sample.prompt_ids for sample in samples], params)
    elapsed = time.perf_counter() - start
    num_in = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_out = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_in + num_out,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_in + num_out) / elapsed,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} "
        f"total tokens/s, "
        f"{num_out / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_in}")
    print(f"Total num output tokens:  {num_out}")
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0


def _samples(args: argparse.Namespace, llm: LLM) -> list[Sample]:
    if args.dataset_name == "sharegpt":
        if not args.dataset_path:
            raise ConfigError("--dataset-name sharegpt needs --dataset-path FILE")
        return sharegpt_samples(
            args.num_prompts, Path(args.dataset_path), llm.get_tokenizer(), output_len=args.output_len
        )
    return random_samples(
        args.num_prompts,
        vocab=llm.config.checkpoint.facts.vocab,
        input_len=args.input_len,
        output_len=args.output_len or 128,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
    )
