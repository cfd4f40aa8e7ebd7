"""Tests that an output that is interrupted and continued from its tokens matches the uninterrupted output."""

from dataclasses import dataclass
from typing import Any

import pytest
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput
from quire.data.params import ReasoningIds, RequestOutputKind
from quire.data.request import Request
from quire.data.wire import Add, decode_to_core, encode
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import OutputBuffer

PROMPT = [7, 40, 41, 42, 40, 41, 9, 40]
LONG = {"max_tokens": 24, "ignore_eos": True}
SAMPLED = LONG | {"temperature": 1.0, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 6, "maxLength": 12},
        "age": {"type": "integer", "minimum": 1000, "maximum": 9999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "disable_any_whitespace": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": LONG | {"temperature": 0},
    "seeded": SAMPLED,
    "without a seed": LONG | {"temperature": 1.0},
    "penalties": SAMPLED | {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "bad words": SAMPLED | {"bad_words": ["quick brown", "a", "the"]},
    "logprobs": SAMPLED | {"logprobs": 3},
    "prompt logprobs": SAMPLED | {"logprobs": 1, "prompt_logprobs": 2},
    "several": SAMPLED | {"n": 3, "logprobs": 0},
    "several with prompt logprobs": SAMPLED | {"n": 2, "prompt_logprobs": 1},
    "schema": {"max_tokens": 60, "temperature": 1.0, "seed": 3, "structured_outputs": JSON},
    "least tokens": {"max_tokens": 20, "min_tokens": 12, "temperature": 1.0, "seed": 5},
    "stop ids": {"max_tokens": 40, "temperature": 1.0, "seed": 6, "stop_token_ids": list(range(40, 60))},
    "stop string": SAMPLED | {"max_tokens": 60, "stop": ["e", "a"], "min_tokens": 3},
    "biased": SAMPLED | {"logit_bias": {50: 3.0, 51: -2.0}, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "repetition": LONG
    | {
        "max_tokens": 40,
        "temperature": 0,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model)


@pytest.fixture(scope="module")
def drafting(model: TextModel) -> LLM:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    return open_text(model, speculative_config=drafts)


def over_the_wire(message: Add) -> list[Request]:
    decoded = decode_to_core(encode(message))
    assert isinstance(decoded, Add)
    return decoded.all()


@dataclass
class Case:
    """One request that can be run repeatedly with the same seed."""

    llm: LLM
    params: SamplingParams

    def __post_init__(self) -> None:
        self.engine = self.llm.llm_engine
        self.prompt = Prompt(list(PROMPT))
        self.requests = self.engine.inputs.requests("a", self.prompt, self.params)

    def answer(self, cut: int | None = None) -> RequestOutput:
        """Run the request; after `cut` steps the core loses all state and continues from the received
        outputs.
        """
        engine, outputs = self.engine, list[RequestOutput]()
        engine.core.clear()
        state = engine.outputs.add("a", self.prompt, self.requests)
        for request in over_the_wire(Add.of(self.requests)):
            engine.core.add(request)
        num_steps = 0
        while engine.has_unfinished_requests():
            outputs += [item for item in engine.step() if isinstance(item, RequestOutput)]
            num_steps += 1
            if num_steps == cut and engine.has_unfinished_requests():
                engine.core.clear()
                engine.outputs.detach(["a"])
                engine.outputs.attach(state)
                for request in over_the_wire(Add(state.continued(self.requests))):
                    engine.core.add(request)
        full = OutputBuffer(outputs[0])
        for output in outputs[1:]:
            full.add(output)
        return full.joined()


def facts(output: RequestOutput) -> list[Any]:
    sequences = [
        (item.index, item.text, item.token_ids, item.logprobs, item.finish_reason, item.stop_reason)
        for item in output.outputs
    ]
    return [output.prompt_token_ids, output.num_cached_tokens, output.prompt_logprobs, sequences]


def check(trial: Case) -> None:
    expected = trial.answer()
    for cut in (1, 2, 9):
        same(facts(trial.answer(cut)), facts(expected))


def same(actual: Any, expected: Any) -> None:
    """Return whether they are equal, except for the last digits of logprobs."""
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            same(one, other)
    elif hasattr(expected, "logprob"):
        same((actual.logprob, actual.decoded_token), (expected.logprob, expected.decoded_token))
    else:
        assert actual == expected


@pytest.mark.parametrize("case", CASES)
def test_resumed_output_matches_uninterrupted_output(llm: LLM, case: str) -> None:
    """Check counters, duplicates and missing tokens."""
    check(Case(llm, SamplingParams(**CASES[case], output_kind=RequestOutputKind.DELTA)))


@pytest.mark.parametrize("case", ["several with prompt logprobs", "stop string"])
def test_resumed_final_only_output_is_complete(llm: LLM, case: str) -> None:
    check(Case(llm, SamplingParams(**CASES[case], output_kind=RequestOutputKind.FINAL_ONLY)))


@pytest.mark.parametrize("case", ["greedy", "penalties", "schema"])
def test_drafts_continue_after_resume(drafting: LLM, case: str) -> None:
    check(Case(drafting, SamplingParams(**CASES[case], output_kind=RequestOutputKind.DELTA)))


def test_reasoning_budget_continues_after_resume(llm: LLM) -> None:
    """Check that reasoning is ended after 9 tokens in total, and that the grammar starts after it."""
    params = SamplingParams(**SAMPLED | {"max_tokens": 70}, structured_outputs=JSON, thinking_token_budget=9)
    params.output_kind = RequestOutputKind.DELTA
    params.reasoning = ReasoningIds((), (60, 61), True)
    trial = Case(llm, params)
    assert trial.answer().outputs[0].token_ids[9:11] == [60, 61]
    check(trial)
