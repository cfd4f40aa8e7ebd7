"""Random traffic on a GPU: arrivals, aborts and preemptions in a small cache, without leaks or errors.

`QUIRE_TEST_TRAFFIC_S` sets the duration, 20 seconds by default, `QUIRE_TEST_TRAFFIC_SEED` the seed.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny, run_hf

from quire import LLM, SamplingParams
from quire.entrypoints.in_process import LocalEngine

pytestmark = pytest.mark.gpu
SECONDS = float(os.environ.get("QUIRE_TEST_TRAFFIC_S", "20"))
SEED = int(os.environ.get("QUIRE_TEST_TRAFFIC_SEED", "0"))
VOCAB, LONGEST = 128, 200


class Traffic:
    def __init__(self, engine: LocalEngine, hf: Any) -> None:
        self.engine, self.hf = engine, hf
        self.rng = random.Random(SEED)
        self.prompts = [self._prompt() for _ in range(12)]
        self.expected = [self._greedy(prompt, 40) for prompt in self.prompts]
        self.running: dict[str, tuple[int | None, SamplingParams]] = {}
        self.counts = {"finished": 0, "checked": 0, "aborted": 0}

    def _prompt(self) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(3, 120))]

    @torch.inference_mode()
    def _greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(run_hf(self.hf, ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _params(self) -> SamplingParams:
        rng = self.rng
        chosen: dict[str, Any] = rng.choice(
            [
                {"temperature": 1.0},
                {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "seed": 3},
                {"temperature": 0.5, "min_p": 0.1, "logprobs": 3},
                {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
                {"temperature": 0, "logit_bias": {7: 3.0}, "min_tokens": 3, "prompt_logprobs": 1},
                {"temperature": 0.9, "allowed_token_ids": [5, 6, 7, 8], "n": 2},
            ]
        )
        return SamplingParams(max_tokens=rng.randrange(3, 60), ignore_eos=rng.random() < 0.5, **chosen)

    def arrive(self, number: int) -> None:
        which = self.rng.randrange(len(self.prompts)) if self.rng.random() < 0.5 else None
        if which is None:
            prompt, params = self._prompt(), self._params()
        else:
            prompt = self.prompts[which]
            params = SamplingParams(temperature=0, max_tokens=self.rng.randrange(1, 41), ignore_eos=True)
        self.running[str(number)] = (which, params)
        self.engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        for output in self.engine.step():
            if not output.finished or output.request_id not in self.running:
                continue
            which, params = self.running.pop(output.request_id)
            self.counts["finished"] += 1
            outputs = list(output.outputs[0].token_ids)
            assert all(0 <= token < VOCAB for token in outputs)
            if which is not None:
                self.counts["checked"] += 1
                assert outputs == self.expected[which][: params.max_tokens]

    def abort_some(self) -> None:
        gone = [id for id in self.running if self.rng.random() < 0.1]
        for id in gone:
            del self.running[id]
            self.counts["aborted"] += 1
        self.engine.abort_request(gone)


@pytest.mark.timeout(SECONDS + 300)
def test_no_leaks_and_correct_outputs(tmp_path: Path) -> None:
    path, hf = make_tiny("qwen3", tmp_path)
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=40,
    )
    traffic = Traffic(llm.llm_engine, hf)
    scheduler, number = llm.llm_engine.core.scheduler, 0
    settled, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(traffic.rng.choice([0, 0, 1, 2, 8])):
            if len(traffic.running) < 100:
                traffic.arrive(number)
                number += 1
        for _ in range(traffic.rng.randrange(1, 10)):
            if llm.llm_engine.has_unfinished_requests():
                traffic.step()
        if traffic.rng.random() < 0.1:
            traffic.abort_some()
        if number > 500 and not settled:
            settled = torch.cuda.memory_allocated()
    while llm.llm_engine.core.has_work:
        traffic.step()
    torch.cuda.synchronize()
    print(f"{number} requests, {traffic.counts}, {scheduler.num_preemptions} preemptions in {SECONDS:.0f} s")
    assert not traffic.running and traffic.counts["checked"] > 20 and scheduler.num_preemptions > 0
    assert scheduler.kv.pool.usage == 0.0
    assert torch.cuda.memory_allocated() <= settled + (8 << 20)
