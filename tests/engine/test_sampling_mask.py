"""Tests of returned sampling masks: the ids that each token could have been."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import open_tiny, prompts_of

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError

SETTINGS: dict[str, Any] = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
LIMITS = {"top_k": 8, "top_p": 0.9, "min_p": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return open_tiny(model, **SETTINGS)


def test_masks_are_the_ids_with_a_probability(llm: LLM) -> None:
    """Check rows with different limits, several sequences, and rows that leave the batch."""
    kinds: list[dict[str, Any]] = [LIMITS, {"top_k": 3}, LIMITS | {"n": 2}, {"top_k": 128}, LIMITS]
    params = [
        SamplingParams(**kind, temperature=0.8, seed=at, max_tokens=6 - at, ignore_eos=True, logprobs=-1)
        for at, kind in enumerate(kinds)
    ]
    sizes = set()
    for output in llm.generate(prompts_of(5, 9, 3, 7, 4), params, use_tqdm=False):
        for completion in output.outputs:
            assert completion.sampling_mask is not None and completion.logprobs is not None
            for token_id, mask, logprobs in zip(
                completion.token_ids, completion.sampling_mask.token_ids, completion.logprobs, strict=True
            ):
                possible = {id for id, item in logprobs.items() if item.logprob > float("-inf")}
                assert token_id in mask and {*mask} == possible and len(mask) == len(possible)
                sizes.add(len(mask))
    assert {3, 128} < sizes, "top_p and min_p leave fewer than top_k"


def test_allowed_ids_narrow_the_mask(llm: LLM) -> None:
    params = SamplingParams(temperature=1, top_k=9, allowed_token_ids=[5, 9, 70], max_tokens=3, seed=1)
    (output,) = llm.generate(prompts_of(5), params, use_tqdm=False)
    mask = output.outputs[0].sampling_mask
    assert mask is not None and [sorted(ids) for ids in mask.token_ids] == [[5, 9, 70]] * 3


@pytest.mark.parametrize(
    ("fields", "param"), [({"temperature": 0, "top_k": 5}, "temperature"), ({}, "top_k")]
)
def test_requests_without_limits_are_refused(fields: dict[str, Any], param: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match="needs a temperature and a top_k above 0") as caught:
        llm.generate(prompts_of(5), SamplingParams(**fields), use_tqdm=False)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "set logprobs_mode to 'processed_logprobs', not 'raw_logprobs'"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "leave out speculative_config",
        ),
        ({"logits_processors": ["module:Class"]}, "leave out logits_processors"),
        ({"runner": "pooling", "convert": "embed"}, "a pooling model samples no token"),
    ],
)
def test_settings_that_cannot_return_masks_are_refused(
    settings: dict[str, Any], words: str, model: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_tiny(model, **(SETTINGS | settings))
