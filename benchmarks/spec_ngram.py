"""Time decodes with n-gram speculation against plain ones, with random weights (their text soon repeats).

    python benchmarks/spec_ngram.py CONFIG_DIR [DRAFTS [wrong]]

With `wrong` as the last argument no draft token is ever accepted.
"""

import collections
import gc
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import generate_s, open_dummy
from torch.profiler import ProfilerActivity, profile

from quire import LLM
from quire.bench.gpu import prompts_of
from quire.worker.cuda.device import CudaDevice

BATCHES = (1, 8, 32)
LENGTH, WRONG, ROUNDS = 767, 560, 5
TRACED = 32
FIRST, RECORDED = 40, 30
"""First recorded step, and number of recorded steps."""


class Steps:
    """Counts steps and records some of them."""

    def __init__(self) -> None:
        self.count = self.num_wide = 0
        self.recorder: profile | None = None
        prepare = CudaDevice.prepare

        def counted(device: CudaDevice, plan: Any, all_rows: Any) -> Any:
            self.count += 1
            self.num_wide += len(plan.num_drafts) > 0
            if self.recorder is not None and self.count in (FIRST, FIRST + RECORDED):
                (self.recorder.start if self.count == FIRST else self.recorder.stop)()
            return prepare(device, plan, all_rows)

        CudaDevice.prepare = counted  # type: ignore[method-assign]


def generate(llm: LLM, batch: int, length: int) -> float:
    return generate_s(llm, prompts_of(random.Random(batch), batch, 256), length)


def rates(llm: LLM, steps: Steps, name: str) -> None:
    for batch in BATCHES:
        generate(llm, batch, LENGTH)
        gc.collect()
        gc.freeze()
        once, best = generate(llm, batch, 1), (0.0, "")
        for _ in range(3):
            steps.count = steps.num_wide = 0
            took = generate(llm, batch, LENGTH) - once
            count, tokens = steps.count - 1, batch * (LENGTH - 1)
            shown = f"{1000 * took / count:7.3f} ms a step, {tokens / count:7.2f} tokens a step"
            best = max(best, (tokens / took, f"{shown}, {steps.num_wide} of {count} steps with drafts"))
        rate, shown = best
        print(f"{name:6} batch {batch:3}: {rate:9.0f} tokens/s, {shown}", flush=True)


def traced(llm: LLM, steps: Steps, name: str) -> None:
    """Print the GPU's kernels of some steps in the middle; only these are recorded, because recording slows
    the host."""
    steps.count, steps.recorder = 0, profile(activities=[ProfilerActivity.CUDA])
    generate(llm, TRACED, LENGTH)
    torch.cuda.synchronize()
    recorder, steps.recorder = steps.recorder, None
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        recorder.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in kinds)
    gaps: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    end, before, began = spans[0][0], "", spans[0][0]
    for start, stop, kernel in spans:
        spent[kernel[:48]] += stop - start
        if start > end:
            gaps[f"{before[:36]} -> {kernel[:36]}"] += start - end
        end, before = max(end, stop), kernel if stop > end else before
    idle = sum(gaps.values())
    busy = (end - began - idle) / RECORDED
    print(f"{name:6} batch {TRACED}: idle {100 * idle / (end - began):.1f} %, busy {busy:.0f} us a step")
    for kind, counted in (("busy", spent), ("idle", gaps)):
        for what, took in counted.most_common(9):
            print(f"    {took / RECORDED:8.1f} us a step {kind}  {what}")
    for kernel in ("_derive", "_verify", "_look_up"):
        print(f"    {spent[kernel] / RECORDED:8.1f} us a step  {kernel}")


def wrong(config_dir: str, num_drafts: int) -> None:
    """Measure the cost of drafts that are never accepted, from an engine's first step on, alternating with
    plain."""
    lookup = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 2}
    never = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * num_drafts}
    drafting = open_dummy(
        config_dir, max_num_seqs=64, num_gpu_blocks_override=4000, speculative_config=lookup | never
    )
    plain = open_dummy(config_dir, max_num_seqs=64, num_gpu_blocks_override=4000)
    steps = Steps()
    generate(plain, BATCHES[-1], 20)
    for batch in BATCHES:
        took: dict[str, list[float]] = {"plain": [], "drafting": []}
        steps.num_wide = 0
        for _ in range(ROUNDS):
            for name, llm in (("drafting", drafting), ("plain", plain)):
                seconds = generate(llm, batch, WRONG) - generate(llm, batch, 1)
                took[name].append(1000 * seconds / (WRONG - 1))
        shown = [f"{median(each):.3f} ({min(each):.3f} to {max(each):.3f})" for each in took.values()]
        ratio = median(took["plain"]) / median(took["drafting"])
        print(
            f"batch {batch:3}: plain {shown[0]}, with drafts {shown[1]} ms a step: {ratio:.3f}x, at first "
            f"{took['plain'][0] / took['drafting'][0]:.3f}x; drafts in "
            f"{100 * steps.num_wide / (ROUNDS * WRONG):.1f} % of steps",
            flush=True,
        )


def main(config_dir: str, num_drafts: int = 4) -> None:
    steps = Steps()
    lookup = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 2}
    for name, more in (("plain", {}), ("ngram", {"speculative_config": lookup})):
        print(name, end=": ")
        llm = open_dummy(config_dir, max_num_seqs=64, gpu_memory_utilization=0.5, **more)
        rates(llm, steps, name)
        traced(llm, steps, name)
        del llm
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if sys.argv[3:] == ["wrong"]:
        wrong(sys.argv[1], int(sys.argv[2]))
    else:
        main(sys.argv[1], *map(int, sys.argv[2:]))
