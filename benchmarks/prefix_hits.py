"""Measure the time to the first token of a prompt whose prefix is in the cache, with random weights.

    python benchmarks/prefix_hits.py CONFIG_DIR [--prompt 16384] [--prefix 15872]

The prefix is a prompt of its own first. Prints the time of a prompt without any hit, that with the hit, and
the tokens of the hit.
"""

import argparse
import statistics
import time

import numpy as np

from quire import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_dir")
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--prefix", type=int, default=15872)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(
        args.config_dir, load_format="dummy", skip_tokenizer_init=True, max_model_len=args.prompt + 1024
    )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    draw = np.random.default_rng(7)

    def first_token_s(ids: list[int]) -> tuple[float, int]:
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return time.perf_counter() - began, output.num_cached_tokens or 0

    def prompt(length: int) -> list[int]:
        ids: list[int] = draw.integers(10, 90, length).tolist()
        return ids

    first_token_s(prompt(args.prompt))  # compiles kernels
    cold, hits, tokens = list[float](), list[float](), set[int]()
    for _ in range(args.rounds):
        prefix = prompt(args.prefix)
        first_token_s(prefix)
        cold.append(first_token_s(prompt(args.prompt))[0])
        seconds, cached = first_token_s(prefix + prompt(args.prompt - args.prefix))
        hits.append(seconds)
        tokens.add(cached)
    cold_ms, hit_ms = 1e3 * statistics.median(cold), 1e3 * statistics.median(hits)
    print(
        f"{args.prompt} tokens: {cold_ms:.1f} ms without a hit, {hit_ms:.1f} ms with one of"
        f" {sorted(tokens)} tokens = {100 * hit_ms / cold_ms:.1f} %",
        flush=True,
    )


if __name__ == "__main__":
    main()
