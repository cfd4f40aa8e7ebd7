"""Tests that tokens sampled with drafts follow the model's probabilities."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle import make_tiny

from quire import LLM, SamplingParams
from quire.worker import cpu

VOCAB, LENGTH = 5, 4
PROMPT = [1, 3, 2, 4]
DRAFTS = [3, 0, 3]
"""Draft tokens that are always proposed."""
Counts = NDArray[np.float64]


class FixedProposer:
    """Always proposes DRAFTS."""

    is_sure = False

    def admit(self, row: int, tokens: Any, salt: str | None = None) -> None: ...

    def extend(self, row: int, tokens: Any) -> None: ...

    def release(self, row: int, tokens: Any) -> None: ...

    def propose(self, row: int, most: int) -> Any:
        return np.array(DRAFTS[:most], np.int32)


class AlwaysDraft:
    """Drafts as many tokens as there are."""

    num_held = num_drafts = 0

    def admit(self, row: int) -> None: ...

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        return available

    def learn(self, rows: Any, num_drafts: Any, num_accepted: Any) -> None:
        self.num_drafts += int(num_drafts.sum())
        self.num_held += int(num_accepted.sum())

    def record_time(self, *numbers: Any) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path, hf = make_tiny("llama", tmp_path_factory.mktemp("chance"), vocab_size=VOCAB)
    return path, hf


def expected(hf: Any) -> Counts:
    """Return the probability of each output, shaped [VOCAB] * LENGTH."""
    answers = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    with torch.inference_mode():
        full = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], 1)
        logprobs = hf(full).logits.double().log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    chances: Counts = logprobs.gather(2, answers[:, :, None]).sum((1, 2)).exp().numpy()
    return chances.reshape([VOCAB] * LENGTH)


def drawn(path: Path, num_samples: int) -> tuple[Counts, AlwaysDraft]:
    """Return how often each output was sampled over many seeds, and the draft policy with its counts."""
    llm = LLM(
        str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=100,
        max_model_len=16,
        use_tqdm_on_load=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": len(DRAFTS)},
    )
    drafting, pace = llm.llm_engine.core.scheduler.admitter.drafting, AlwaysDraft()
    assert drafting is not None
    drafting._draft_length, drafting._proposer = pace, FixedProposer()
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        for seed in range(num_samples)
    ]
    prompts = [{"prompt_token_ids": PROMPT}] * num_samples
    counts = np.zeros([VOCAB] * LENGTH)
    for output in llm.generate(prompts, params, use_tqdm=False):
        counts[tuple(output.outputs[0].token_ids)] += 1
    return counts, pace


def distance(counts: Counts, chances: Counts) -> float:
    """Return the worst chi-square over pairs of successive tokens, in standard deviations from its mean.

    Rare pairs are merged into one.
    """
    actual, num_samples = [], counts.sum()
    for place in range(1, LENGTH):
        others = tuple(at for at in range(LENGTH) if at not in (place - 1, place))
        seen, wanted = counts.sum(others).ravel(), num_samples * chances.sum(others).ravel()
        few = wanted < 10
        seen, wanted = (np.append(item[~few], item[few].sum()) for item in (seen, wanted))
        degrees = len(wanted) - 1
        assert degrees > 5
        actual.append((((seen - wanted) ** 2 / wanted).sum() - degrees) / math.sqrt(2 * degrees))
    return float(max(actual))


def test_sampled_outputs_follow_the_models_distribution(model: tuple[Path, Any]) -> None:
    """Check that no draft is sampled more or less often than its probability."""
    path, hf = model
    counts, pace = drawn(path, 4000)
    assert 0.1 < pace.num_held / pace.num_drafts < 0.5
    assert distance(counts, expected(hf)) < 4


def test_wrong_acceptance_rule_is_detected(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that accepting a draft although another token was sampled is detected."""
    path, hf = model
    true = cpu.count_accepted

    def lenient(tokens: Any, drafts: Any, num_drafts: Any) -> Any:
        firsts = np.cumsum(1 + num_drafts) - 1 - num_drafts
        some = firsts[(tokens[firsts] == 1) & (num_drafts > 0)]
        tokens[some] = DRAFTS[0]
        return true(tokens, drafts, num_drafts)

    monkeypatch.setattr(cpu, "count_accepted", lenient)
    assert distance(drawn(path, 1000)[0], expected(hf)) > 20
