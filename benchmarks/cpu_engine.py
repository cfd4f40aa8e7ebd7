"""Measure prompt and decode tokens per second of an engine in this process.

python benchmarks/cpu_engine.py MODEL...
"""

import sys

from measuring import generate_s

from quire import LLM


def best(llm: LLM, num: int, prompt_len: int, length: int) -> float:
    """Return the seconds of the fastest of three runs of `num` prompts, each of `prompt_len` tokens with
    `length` generated tokens."""
    prompts = [[(7 * i + 13 * j) % 40_000 + 5 for j in range(prompt_len)] for i in range(num)]
    return min(generate_s(llm, prompts, length) for _ in range(3))


def main(model: str) -> None:
    llm = LLM(model, max_model_len=2304, max_num_seqs=32, enable_prefix_caching=False, disable_log_stats=True)
    best(llm, 1, 64, 8)
    rates = {
        "prompt of 512": 512 / best(llm, 1, 512, 1),
        "of 2,048": 2048 / best(llm, 1, 2048, 1),
        "decode": 128 / (best(llm, 1, 16, 129) - best(llm, 1, 16, 1)),
        "of 32": 32 * 32 / (best(llm, 32, 16, 33) - best(llm, 32, 16, 1)),
    }
    print(model, *(f"{name} {rate:.0f}" for name, rate in rates.items()), sep="  ")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(each)
