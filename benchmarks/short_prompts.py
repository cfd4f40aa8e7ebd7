"""Time the first token of short prompts with and without CUDA graphs.

    python benchmarks/short_prompts.py DIR

First one request at a time with random weights; then 32 prompts of mixed lengths at once, 40 tokens each.
"""

import gc
import sys
from statistics import median

import numpy as np
from measuring import generate_s, open_dummy

from quire.worker.cuda.graphs import Graphs

LENGTHS = (20, 60, 120, 250, 380, 500, 600, 1000)
REPEATS = 9


def main(path: str) -> None:
    rng = np.random.default_rng(0)
    llm = open_dummy(path, gpu_memory_utilization=0.9)
    prompts = {
        length: [{"prompt_token_ids": rng.integers(0, 10000, length).tolist()} for _ in range(REPEATS)]
        for length in LENGTHS
    }
    (graphs,) = (each for each in gc.get_objects() if isinstance(each, Graphs))
    short = graphs._mixed_graphs
    for name, used in (("graphs", short), ("without", {False: [], True: []}), ("graphs", short)):
        graphs._mixed_graphs = used
        firsts = {
            length: median(generate_s(llm, [prompt], 1) for prompt in some)
            for length, some in prompts.items()
        }
        mixed = generate_s(llm, [prompts[length][n] for n in range(8) for length in (20, 60, 120, 250)], 40)
        line = "  ".join(f"{length}: {1e3 * each:.2f}" for length, each in firsts.items())
        print(f"{name:8} ms to the first token: {line};  32 mixed {1e3 * mixed:.0f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
