"""Time decode steps, prompts and the first use of an adapter, by number of LoRA adapters.

    python benchmarks/lora_engine.py CONFIG_DIR [--adapters N]

Weights and adapters are random. `--adapters 0` is an engine without LoRA.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import test_helpers  # noqa: F401, I001
from measuring import open_dummy
from random_adapters import write_adapters

from quire import LLM, LoRARequest
from quire.bench.gpu import DECODE_PROMPT, DECODE_STEPS, no_collections, prompts_of
from quire.bench.gpu import random as chance
from quire.data.params import SamplingParams

REPEATS = 3


def seconds(llm: LLM, prompts: list[list[int]], length: int, adapters: list[LoRARequest]) -> float:
    """Return the seconds until all outputs of `length` tokens are complete; requests are assigned to the
    adapters in turn."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    own = [adapters[i % len(adapters)] if adapters else None for i in range(len(prompts))]
    with no_collections():
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=own, use_tqdm=False)
        took = time.perf_counter() - began
    assert [len(output.outputs[0].token_ids) for output in outputs] == [length] * len(prompts)
    return took


def decode_ms(llm: LLM, batch: int, adapters: list[LoRARequest]) -> float:
    rng, found = chance.Random(batch), []
    seconds(llm, prompts_of(rng, batch, DECODE_PROMPT), 4, adapters)
    for _ in range(REPEATS):
        prompts = prompts_of(rng, batch, DECODE_PROMPT)
        one = seconds(llm, prompts, 1, adapters)
        found.append((seconds(llm, prompts, DECODE_STEPS, adapters) - one) / (DECODE_STEPS - 1))
    return 1000 * statistics.median(found)


def prefill_rate(llm: LLM, adapters: list[LoRARequest]) -> float:
    rng, took = chance.Random(1), []
    for _ in range(REPEATS):
        took.append(seconds(llm, prompts_of(rng, 16, 2048), 1, adapters))
    return 16 * 2048 / statistics.median(took)


def first_use_ms(llm: LLM, adapters: list[LoRARequest]) -> tuple[float, float]:
    """Return the added milliseconds of an adapter's first use, read from disk, and of its second, from host
    memory."""
    prompt, rng, plain, new = [[1, 2, 3]], chance.Random(2), [], []
    for _ in range(5):
        plain.append(seconds(llm, prompts_of(rng, 1, 16), 1, []))
    for adapter in adapters:
        new.append(seconds(llm, prompt, 1, [adapter]))
    again = [seconds(llm, prompt, 1, [adapter]) for adapter in adapters]
    base = statistics.median(plain)
    return 1000 * (statistics.median(new) - base), 1000 * (statistics.median(again) - base)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--adapters", type=int, default=8, help="Slots; 0: an engine without adapters.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--used", type=int, nargs="+", default=[0, 1, 8], help="Adapters in a batch.")
    parser.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    model = json.loads((Path(args.config) / "config.json").read_text())
    folder = Path(tempfile.mkdtemp())
    adapters = write_adapters(folder, model, args.rank, args.adapters + 4)
    llm = open_dummy(
        args.config,
        gpu_memory_utilization=0.9,
        enable_lora=args.adapters > 0,
        max_loras=max(args.adapters, 1),
        max_cpu_loras=args.adapters + 4,
        max_lora_rank=args.rank,
    )
    seconds(llm, [[1, 2, 3]], 1, [])
    if args.adapters:
        seconds(llm, [[1, 2, 3]], 1, adapters[:1])
        new, again = first_use_ms(llm, adapters[-4:])
        print(f"first use {new:.1f} ms, the one after {again:.1f} ms", flush=True)
    for used in args.used if args.adapters else [0]:
        for batch in args.batch:
            if used <= batch:
                ms = decode_ms(llm, batch, adapters[:used])
                print(f"batch {batch}, {used} of {args.adapters} adapters: {ms:.3f} ms", flush=True)
        if args.prefill:
            print(f"prefill, {used} adapters: {prefill_rate(llm, adapters[:used]):.0f} tok/s", flush=True)
    llm.llm_engine.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
