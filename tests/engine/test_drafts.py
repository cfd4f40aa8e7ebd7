"""Tests that correct and wrong draft tokens do not change outputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_text import VOCAB, TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput
from quire.kernels.cpu import native

PROMPTS = [[40 + at, 300, 77, 310, 90, 77, 310, 90 + at] * (1 + at) for at in range(4)]
CHOICE = ["a page is a leaf of a book", "a leaf is a page of a book", "a book is a leaf"]
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LENGTH = {"max_tokens": 24, "ignore_eos": True}
PARAMS_BY_NAME: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, **LENGTH},
    "greedy until it ends": {"temperature": 0, "max_tokens": 40},
    "sampled": {"temperature": 1.0, "seed": 3, **LENGTH},
    "limited": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4, **LENGTH},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        **LENGTH,
    },
    "biases": {"temperature": 0, "logit_bias": {77: 2.5, 90: -3.0}, "bad_words": ["the"], **LENGTH},
    "allowed": {"temperature": 1.0, "seed": 6, "allowed_token_ids": list(range(60, 200)), **LENGTH},
    "least": {"temperature": 1.0, "seed": 7, "min_tokens": 9, "max_tokens": 30},
    "logprobs": {"temperature": 0.9, "seed": 8, "logprobs": 3, "prompt_logprobs": 1, **LENGTH},
    "listed logprobs": {"temperature": 0, "logprob_token_ids": [5, 90], **LENGTH},
    "stop strings": {"temperature": 0, "stop": ["e", "th"], "logprobs": 1, "max_tokens": 40},
    "stop ids": {"temperature": 1.0, "seed": 9, "stop_token_ids": list(range(0, 340, 7)), "max_tokens": 40},
    "several": {"temperature": 1.0, "seed": 10, "n": 3, **LENGTH},
    "choice": {"temperature": 1.0, "seed": 11, "max_tokens": 40, "structured_outputs": {"choice": CHOICE}},
    "json": {"temperature": 0.9, "seed": 12, "max_tokens": 60, "structured_outputs": {"json": RECORD}},
    "repetition": {
        "temperature": 0,
        "max_tokens": 60,
        "repetition_detection": {"max_pattern_size": 8, "min_count": 3},
    },
}


class ReplayProposer:
    """Proposes the expected outputs with occasional mistakes."""

    is_sure = False

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.texts: dict[int, list[int]] = {}
        self.num_right = 0

    def admit(self, row: int, tokens: Any, salt: str | None = None) -> None:
        self.texts[row] = tokens.tolist()

    def extend(self, row: int, tokens: Any) -> None:
        self.texts[row] += tokens.tolist()

    def release(self, row: int, tokens: Any) -> None:
        del self.texts[row]

    def propose(self, row: int, most: int) -> Any:
        text = self.texts[row]
        full = next((output for output in self.answers if output[: len(text)] == text), text)
        actual = full[len(text) : len(text) + most]
        mistakes = [output + ((len(text) + at) % 4 == 0) for at, output in enumerate(actual)]
        return np.array(mistakes, np.int32) % VOCAB


class AlwaysDraft:
    """Drafts as many tokens as there are."""

    num_held = num_drafts = 0

    def admit(self, row: int) -> None:
        pass

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        return np.clip(budget - (np.cumsum(available) - available), 0, available).astype(np.int32)

    def learn(self, rows: Any, num_drafts: Any, num_accepted: Any) -> None:
        self.num_drafts += int(num_drafts.sum())
        self.num_held += int(num_accepted.sum())

    def record_time(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def plain(model: TextModel) -> LLM:
    return open_text(model)


@pytest.fixture(scope="module")
def drafting(model: TextModel) -> LLM:
    return open_text(model, speculative_config={"method": "ngram", "num_speculative_tokens": 5})


def ask(llm: LLM, fields: dict[str, Any]) -> list[RequestOutput]:
    return llm.generate(PROMPTS, SamplingParams(**fields), use_tqdm=False)


def exact(logprob: float) -> Any:
    return logprob


def rounded(logprob: float) -> Any:
    return pytest.approx(logprob, abs=1e-4)


def values(positions: Any, number: Callable[[float], Any]) -> Any:
    """Return the logprobs of each position by token, with ranks and texts."""
    return positions and [
        one
        and {token: (number(entry.logprob), entry.rank, entry.decoded_token) for token, entry in one.items()}
        for one in positions
    ]


def facts(outputs: list[RequestOutput], number: Callable[[float], Any] = exact) -> list[Any]:
    """Return all fields that must be equal."""
    return [
        (
            values(output.prompt_logprobs, number),
            answer.token_ids,
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            values(answer.logprobs, number),
        )
        for output in outputs
        for answer in output.outputs
    ]


def expected_facts(outputs: list[RequestOutput]) -> list[Any]:
    """Return the expected fields, with rounded logprobs if there are no C kernels.

    The C kernels are batch-invariant; torch matmuls may sum in another order in a larger batch.
    """
    return facts(outputs, rounded if native.library() is None else exact)


def sequences(outputs: list[RequestOutput]) -> list[list[int]]:
    return [
        [*(output.prompt_token_ids or ()), *item.token_ids] for output in outputs for item in output.outputs
    ]


def always_draft(llm: LLM, proposer: Any = None) -> AlwaysDraft:
    """Make the engine always draft, optionally with another proposer."""
    drafting, pace = llm.llm_engine.core.scheduler.admitter.drafting, AlwaysDraft()
    assert drafting is not None
    drafting._draft_length = pace
    if proposer is not None:
        drafting._proposer = proposer
    return pace


@pytest.mark.parametrize("params", PARAMS_BY_NAME)
def test_drafts_do_not_change_outputs(params: str, plain: LLM, drafting: LLM) -> None:
    expected = ask(plain, PARAMS_BY_NAME[params])
    pace = always_draft(drafting, ReplayProposer(sequences(expected)))
    actual = ask(drafting, PARAMS_BY_NAME[params])
    assert facts(actual) == expected_facts(expected)
    assert 0 < pace.num_held < pace.num_drafts


@pytest.mark.parametrize(
    "settings",
    [{"num_gpu_blocks_override": 34}, {"max_num_batched_tokens": 20}, {"enforce_eager": True}],
    ids=["preemption", "chunks", "eager"],
)
def test_drafts_do_not_change_outputs_with_few_blocks_or_tokens(
    settings: dict[str, Any], model: TextModel, plain: LLM
) -> None:
    params = {"temperature": 0.9, "seed": 2, "max_tokens": 40, "ignore_eos": True}
    expected = ask(plain, params)
    config = {"method": "ngram", "num_speculative_tokens": 5}
    llm = open_text(model, speculative_config=config, max_model_len=128, **settings)
    pace = always_draft(llm, ReplayProposer(sequences(expected)))
    assert facts(ask(llm, params)) == expected_facts(expected)
    if "num_gpu_blocks_override" in settings:
        assert llm.llm_engine.core.scheduler.num_preemptions
    second = ask(llm, params)  # prefixes written by accepted drafts are cached too
    assert facts(second) == expected_facts(expected)
    assert any(output.num_cached_tokens for output in second)
    assert 0 < pace.num_held < pace.num_drafts
    assert llm.llm_engine.core.scheduler.kv.pool.usage == 0.0


def test_prompt_lookup_drafts_repeating_text(model: TextModel, plain: LLM) -> None:
    """Check a vocabulary of three tokens, which soon repeats."""
    words = {"allowed_token_ids": [60, 61, 62]}
    params = {"temperature": 0, "max_tokens": 80, "ignore_eos": True, **words}
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    llm = open_text(model, speculative_config=config)
    pace = always_draft(llm)
    assert facts(ask(llm, params)) == expected_facts(ask(plain, params))
    assert pace.num_held > 40


def test_draft_metrics_are_counted(model: TextModel, plain: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    config = {"method": "ngram", "num_speculative_tokens": 5}
    llm = open_text(model, speculative_config=config, disable_log_stats=False)
    pace = always_draft(llm, ReplayProposer(sequences(ask(plain, params))))
    outputs = ask(llm, params)
    actual = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    drafts, tokens, held = (actual[name].value for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert (tokens, held) == (pace.num_drafts, pace.num_held)
    by_place = actual["accepted_tokens_per_pos"].values
    assert sum(by_place) == held and len(by_place) == 5 and drafts >= by_place[0] >= by_place[1] > 0
    of_each = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert sum(item["num_accepted_tokens"] for item in of_each if item) == held
    assert sum(output.metrics.num_draft_tokens for output in outputs if output.metrics) == tokens


def test_grammar_holds_with_a_draft_model(model: TextModel, plain: LLM) -> None:
    """Check drafts that the host, which fills the masks, does not have yet, also with an incomplete last
    block.
    """
    config = {"model": str(model.path), "num_speculative_tokens": 3}
    llm = open_text(model, speculative_config=config, max_model_len=99, block_size=16)
    pace = always_draft(llm)
    for params in ("json", "choice", "greedy"):
        assert facts(ask(llm, PARAMS_BY_NAME[params])) == expected_facts(ask(plain, PARAMS_BY_NAME[params]))
    full = {"temperature": 0, "max_tokens": 99 - 8, "ignore_eos": True}
    actual = [item.generate(PROMPTS[:1], SamplingParams(**full), use_tqdm=False) for item in (llm, plain)]
    assert facts(actual[0]) == expected_facts(actual[1]) and pace.num_held > 20
