"""An answer that is broken off and continued from the tokens so far is the one that nothing disturbed."""

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
class Trial:
    """One request, which may be answered again and again, with the same seed."""

    llm: LLM
    params: SamplingParams

    def __post_init__(self) -> None:
        self.engine = self.llm.llm_engine
        self.prompt = Prompt(list(PROMPT))
        self.requests = self.engine.inputs.requests("a", self.prompt, self.params)

    def answer(self, cut: int | None = None) -> RequestOutput:
        """Run it. After `cut` steps the core loses everything, and goes on from what has come out of it."""
        engine, outputs = self.engine, list[RequestOutput]()
        engine.core.clear()
        state = engine.outputs.add("a", self.prompt, self.requests)
        for request in over_the_wire(Add.of(self.requests)):
            engine.core.add(request)
        num_steps = 0
        while engine.has_unfinished_requests():
            outputs += [each for each in engine.step() if isinstance(each, RequestOutput)]
            num_steps += 1
            if num_steps == cut and engine.has_unfinished_requests():
                engine.core.clear()
                engine.outputs.detach(["a"])
                engine.outputs.attach(state)
                for request in over_the_wire(Add(state.continued(self.requests))):
                    engine.core.add(request)
        whole = OutputBuffer(outputs[0])
        for output in outputs[1:]:
            whole.add(output)
        return whole.joined()


def facts(output: RequestOutput) -> list[Any]:
    sequences = [
        (each.index, each.text, each.token_ids, each.logprobs, each.finish_reason, each.stop_reason)
        for each in output.outputs
    ]
    return [output.prompt_token_ids, output.num_cached_tokens, output.prompt_logprobs, sequences]


def check(trial: Trial) -> None:
    expected = trial.answer()
    for cut in (1, 2, 9):
        same(facts(trial.answer(cut)), facts(expected))


def same(found: Any, expected: Any) -> None:
    """Equal, with logprobs that another order of sums may change in their last digits."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif hasattr(expected, "logprob"):
        same((found.logprob, found.decoded_token), (expected.logprob, expected.decoded_token))
    else:
        assert found == expected


@pytest.mark.parametrize("case", CASES)
def test_a_continued_answer_is_the_undisturbed_one(llm: LLM, case: str) -> None:
    """Catches what is counted from the wrong token on, told twice, or forgotten."""
    check(Trial(llm, SamplingParams(**CASES[case], output_kind=RequestOutputKind.DELTA)))


@pytest.mark.parametrize("case", ["several with prompt logprobs", "stop string"])
def test_an_answer_that_is_told_at_its_end_is_whole(llm: LLM, case: str) -> None:
    check(Trial(llm, SamplingParams(**CASES[case], output_kind=RequestOutputKind.FINAL_ONLY)))


@pytest.mark.parametrize("case", ["greedy", "penalties", "schema"])
def test_drafts_go_on_with_a_continued_answer(drafting: LLM, case: str) -> None:
    check(Trial(drafting, SamplingParams(**CASES[case], output_kind=RequestOutputKind.DELTA)))


def test_reasoning_and_its_budget_go_on_where_they_were(llm: LLM) -> None:
    """The end of the reasoning is forced after 9 tokens in all, and the grammar begins behind it."""
    params = SamplingParams(**SAMPLED | {"max_tokens": 70}, structured_outputs=JSON, thinking_token_budget=9)
    params.output_kind = RequestOutputKind.DELTA
    params.reasoning = ReasoningIds((), (60, 61), True)
    trial = Trial(llm, params)
    assert trial.answer().outputs[0].token_ids[9:11] == [60, 61]
    check(trial)
