"""Time decodes with a draft model against plain ones, with a forced acceptance rate.

    python benchmarks/spec_draft_model.py TARGET_DIR DRAFT_DIR [DRAFTS [RATE]]

A step with K draft tokens should take one verification by the target and K decode steps of the draft model,
and yields E = 1 + r + ... + r^K tokens per row at acceptance rate r. The ideal gain is E * plain / (verify
+ K * draft). Each term is measured here: plain and draft as decode steps of separate engines, verify as
steps with free draft tokens.
"""

import gc
import random
import sys
import time
from typing import Any

import torch
from measuring import open_dummy

from quire import LLM, SamplingParams
from quire.bench.gpu import prompts_of
from quire.worker.cuda.draft_graphs import DraftGraphs

BATCHES = (1, 8, 32)
LENGTH, PROMPT, WARM = 320, 256, 40


class Clock:
    """Recorder of the times and of the numbers of tokens of decode steps."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.steps: list[tuple[float, int, int, int]] = []
        scheduler = llm.llm_engine.core.scheduler
        update = scheduler.update

        def noted(plan: Any, result: Any) -> Any:
            if plan.total_tokens == len(plan.logit_rows):
                drafts = int(plan.num_drafts.sum())
                self.steps.append((time.perf_counter(), len(result.token_ids), len(plan.rows), drafts))
            return update(plan, result)

        scheduler.update = noted  # type: ignore[method-assign]

    def run(self, batch: int) -> tuple[float, float, float]:
        """Decode `batch` sequences; return the milliseconds of a step, and the tokens and drafts per row
        and step, while all rows decode."""
        self.steps.clear()
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        prompts = prompts_of(random.Random(batch), batch, PROMPT)
        self.llm.generate(prompts, params, use_tqdm=False)
        whole = [step for step in self.steps if step[2] == batch][WARM:]
        (began, *_), (ended, *_), count = whole[0], whole[-1], len(whole) - 1
        tokens, drafts = (sum(step[at] for step in whole[1:]) for at in (1, 3))
        return 1000 * (ended - began) / count, tokens / count / batch, drafts / count / batch


def opened(path: str, **settings: Any) -> LLM:
    return open_dummy(path, max_num_seqs=BATCHES[-1], gpu_memory_utilization=0.8, **settings)


def times(path: str) -> dict[int, float]:
    clock = Clock(opened(path))
    found = {batch: min(clock.run(batch)[0] for _ in range(2)) for batch in BATCHES}
    clock.llm.llm_engine.core.scheduler.update = None  # type: ignore[method-assign, assignment]
    del clock
    gc.collect()
    torch.cuda.empty_cache()
    return found


class Always:
    """Draft length control that always allows all available draft tokens."""

    def admit(self, row: int) -> None: ...

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        return available

    def learn(self, *numbers: Any) -> None: ...

    def record_time(self, *numbers: Any) -> None: ...


def best(clock: Clock, batch: int) -> tuple[float, float, float]:
    return max((clock.run(batch) for _ in range(2)), key=lambda run: run[1] / run[0])


def main(target: str, draft: str, most: int = 3, rate: float = 0.7) -> None:
    plain, small = times(target), times(draft)
    rates = [rate ** (at + 1) for at in range(most)]
    asked = {"model": draft, "num_speculative_tokens": most, "synthetic_acceptance_rates": rates}
    clock = Clock(opened(target, speculative_config=asked | {"rejection_sample_method": "synthetic"}))
    found = {}
    for batch in BATCHES:
        clock.run(batch)
        found["by pace", batch] = best(clock, batch)
    drafting = clock.llm.llm_engine.core.scheduler.admitter.drafting
    assert drafting is not None
    drafting._pace = Always()
    found |= {("always", batch): best(clock, batch) for batch in BATCHES}
    # Draft tokens that exist at no cost, with any content.
    DraftGraphs.__call__ = lambda self, plan: self.spec_tokens.num_drafts.fill_(most)  # type: ignore[method-assign, assignment]
    verify = {batch: best(clock, batch)[0] for batch in BATCHES}
    expected = sum(rate**at for at in range(most + 1))
    for (name, batch), (step, tokens, drafts) in found.items():
        ideal = expected * plain[batch] / (verify[batch] + most * small[batch])
        gain = tokens * plain[batch] / step
        print(
            f"{name:8} batch {batch:3}: plain {plain[batch]:.3f}, draft {small[batch]:.3f}, verify "
            f"{verify[batch]:.3f} ms; with {drafts:.2f} drafts a row {step:.3f} ms and {tokens:.2f} of "
            f"{expected:.2f} tokens; gain {gain:.3f}, ideal {ideal:.3f}: {100 * gain / ideal:.0f} %",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]), *map(float, sys.argv[4:5]))
