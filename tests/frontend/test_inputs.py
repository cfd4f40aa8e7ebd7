"""Tests of inputs: accepted prompts and rejected ones."""

from typing import Any

import numpy as np
import pytest
from tiny_text import EOS, IM_END, VOCAB, text_model

from quire.data.params import SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import InputProcessor, Prompt
from quire.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(text_model(tmp_path_factory.getbasetemp()).path, "hf")


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return processor(tokenizer=tokenizer)


def processor(**settings: Any) -> InputProcessor:
    limits: dict[str, Any] = {"vocab": VOCAB, "max_model_len": 32, "max_logprobs": 20, "seed": 0}
    return InputProcessor(**({"tokenizer": None, "eos_ids": (EOS, IM_END)} | limits | settings))


def test_ids_of_any_integer_type_become_plain_integers(inputs: InputProcessor) -> None:
    parsed = inputs.parse([np.int64(5), np.int32(6), 7])
    assert parsed.token_ids == [5, 6, 7] and all(type(id) is int for id in parsed.token_ids)


def test_callers_list_is_copied(inputs: InputProcessor) -> None:
    """Check that the caller may change it while the engine uses the prompt."""
    ids = [5, 6]
    prompt = inputs.parse({"prompt_token_ids": ids})
    (request,) = inputs.requests("a", prompt, SamplingParams())
    ids.append(9)
    assert request.tokens == [5, 6] == prompt.token_ids


@pytest.mark.parametrize(("length", "fits"), [(31, True), (32, False), (33, False)])
def test_prompt_must_leave_space_for_one_token(inputs: InputProcessor, length: int, fits: bool) -> None:
    if fits:
        assert len(inputs.parse([5] * length).token_ids) == length
        return
    with pytest.raises(RequestError, match=f"length is 32 tokens.*contains {length} input tokens") as caught:
        inputs.parse([5] * length)
    assert caught.value.param == "input_tokens"


def test_prompt_larger_than_any_step_is_rejected() -> None:
    """Check that it does not wait forever at the head of the queue."""
    inputs = processor(max_prompt_len=9)
    assert len(inputs.parse([5] * 9).token_ids) == 9
    with pytest.raises(RequestError, match="contains 10 input tokens.*at most 9.*chunked_prefill") as caught:
        inputs.parse([5] * 10)
    assert caught.value.param == "input_tokens"


def test_overlong_text_is_rejected_before_tokenization(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(RequestError, match="at least 39062 input tokens"):
        inputs.parse("a" * 10_000_000)


@pytest.mark.parametrize(("max_tokens", "limit"), [(1, 11), (21, 31), (22, 32), (500, 32), (None, 32)])
def test_sequence_ends_at_max_tokens_or_max_model_len(max_tokens: int | None, limit: int) -> None:
    (request,) = processor().requests("a", Prompt([5] * 10), SamplingParams(max_tokens=max_tokens))
    assert request.limit == limit


def test_single_sample_keeps_the_id_and_several_are_numbered() -> None:
    inputs = processor()
    assert [request.id for request in inputs.requests("a", Prompt([5]), SamplingParams())] == ["a"]
    children = inputs.requests("a", Prompt([5]), SamplingParams(n=3, seed=10))
    assert [request.id for request in children] == ["0_a", "1_a", "2_a"]
    assert [request.seed for request in children] == [10, 11, 12]
    assert len({id(request.tokens) for request in children}) == 1, "a prompt is stored once"


def test_only_the_first_of_n_samples_computes_prompt_logprobs() -> None:
    """Check that the others may read the cached prefix, which the first must not."""
    params = SamplingParams(n=3, prompt_logprobs=2)
    first, *others = processor().requests("a", Prompt([5]), params)
    assert first.params.prompt_logprobs == 2 and first.params.skip_reading_prefix_cache
    for other in others:
        assert other.params.prompt_logprobs is None and not other.params.skip_reading_prefix_cache


def test_seeds_of_unseeded_requests_follow_the_engine_seed() -> None:
    def seeds(seed: int) -> list[int]:
        inputs = processor(seed=seed)
        return [inputs.requests(str(i), Prompt([5]), SamplingParams())[0].seed for i in range(3)]

    assert seeds(1) == seeds(1) != seeds(2) and len(set(seeds(1))) == 3


def test_eos_ids_become_eos_and_stop_ids_unless_ignored() -> None:
    inputs = processor()
    (request,) = inputs.requests("a", Prompt([5]), SamplingParams(stop_token_ids=[9, IM_END]))
    assert request.eos_id == EOS and request.params.stop_token_ids == [9, IM_END]
    assert request.held_ids == (EOS, 9, IM_END)
    (request,) = inputs.requests("a", Prompt([5]), SamplingParams(ignore_eos=True, stop_token_ids=[9]))
    assert request.eos_id == -1 and request.params.stop_token_ids == [9] and request.held_ids == (9,)
    (request,) = processor(eos_ids=()).requests("a", Prompt([5]), SamplingParams())
    assert request.eos_id == -1


def test_callers_params_are_not_changed(inputs: InputProcessor) -> None:
    params = SamplingParams(bad_words=["dog"], stop_token_ids=[9])
    inputs.requests("a", Prompt([5]), params)
    assert params == SamplingParams(bad_words=["dog"], stop_token_ids=[9])


def test_bad_words_are_tokenized_with_and_without_a_space(
    inputs: InputProcessor, tokenizer: Tokenizer
) -> None:
    (request,) = inputs.requests("a", Prompt([5]), SamplingParams(bad_words=["dog", " dog"]))
    spellings = [tokenizer.encode(text, add_special_tokens=False) for text in ("dog", " dog")]
    assert request.params.bad_words_token_ids == spellings


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"allowed_token_ids": [VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
        {"logprob_token_ids": [VOCAB]},
        {"structured_outputs": {"regex": "a"}},
    ],
)
def test_params_are_validated_against_the_model(inputs: InputProcessor, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        inputs.requests("a", Prompt([5]), SamplingParams(**fields))
    assert caught.value.param == next(iter(fields))


def test_without_tokenizer_only_ids_are_accepted() -> None:
    inputs = processor()
    (request,) = inputs.requests("a", inputs.parse([5]), SamplingParams())
    assert not request.params.detokenize
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        inputs.parse({"prompt": "text"})
