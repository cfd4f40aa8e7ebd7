"""Tests of speculative_config: its methods, defaults and errors, and its interaction with engine
settings."""

from typing import Any

import pytest

from quire.config.args import check_args
from quire.config.speculation import SpecFacts
from quire.errors import ConfigError


def facts(config: dict[str, Any], draft: dict[str, Any] | None = None, **values: Any) -> SpecFacts:
    result = SpecFacts.of(
        {"speculative_config": config, **values}, max_model_len=64, tensor_parallel_size=4, draft=draft
    )
    assert result is not None
    return result


def test_speculation_is_off_by_default() -> None:
    for settings in ({}, {"speculative_config": {}, "spec_tokens": None}):
        assert SpecFacts.of(check_args(settings), max_model_len=64) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "ngram_gpu"}, "spec_tokens": 3},
        {"spec_method": "ngram", "spec_tokens": 3},
        {"spec_model": "ngram", "spec_tokens": 3},
        {"speculative_model": "ngram", "num_speculative_tokens": 3},
    ],
)
def test_prompt_lookup_settings(settings: dict[str, Any]) -> None:
    spec = SpecFacts.of(check_args(settings), max_model_len=64)
    assert spec is not None and (spec.method, spec.num_speculative_tokens) == ("ngram", 3)
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max, spec.model) == (5, 5, None)


@pytest.mark.parametrize(
    ("bounds", "expected"), [({"min": 2}, (2, 2)), ({"max": 3}, (3, 3)), ({"min": 2, "max": 4}, (2, 4))]
)
def test_one_lookup_bound_sets_both(bounds: dict[str, int], expected: tuple[int, int]) -> None:
    spec = facts(
        {"method": "ngram", "num_speculative_tokens": 3}
        | {f"prompt_lookup_{end}": size for end, size in bounds.items()}
    )
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == expected


def test_suffix_drafts_are_as_long_as_the_tree_is_deep() -> None:
    assert facts({"method": "suffix"}).num_speculative_tokens == 24
    assert facts({"method": "suffix", "suffix_decoding_max_tree_depth": 8}).num_speculative_tokens == 8


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_speculative_tokens": 3}, ["neither a method nor a model", '"ngram"']),
        ({"method": "ngram"}, ["num_speculative_tokens", "n_predict"]),
        ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "at least 1"]),
        ({**NGRAM, "num_speculative_tokens": True}, ["num_speculative_tokens=True", "an integer"]),
        ({**NGRAM, "method": "ngrm"}, ["'ngrm'", "eagle3, mtp; did you mean 'ngram'"]),
        ({**NGRAM, "method": 5}, ["speculative_config.method=5", "a string"]),
        ({**NGRAM, "promt_lookup_min": 2}, ["'promt_lookup_min'", "did you mean 'prompt_lookup_min'"]),
        (
            {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            ["prompt_lookup_min=4 must be <= prompt_lookup_max=2"],
        ),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, ["=2", "1 or target", "(4)"]),
        ({**NGRAM, "max_model_len": 65}, ["max_model_len=65", "(64)"]),
        ({**NGRAM, "method": "medusa"}, ["method='medusa' is not supported yet", "'suffix'"]),
        ({**NGRAM, "rejection_sample_method": "block"}, ["'block' is not supported yet", "'standard'"]),
        ({**NGRAM, "rejection_sample_method": "odd"}, ["'odd'", "standard, block, synthetic"]),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, ["synthetic_acceptance_length"]),
        ({**NGRAM, "synthetic_acceptance_rates": [0.2, 0.5, 0.1]}, ["none above the one before"]),
        ({**NGRAM, "synthetic_acceptance_rates": [0.5]}, ["num_speculative_tokens (3) numbers"]),
        ({**NGRAM, "synthetic_acceptance_rates": 0.5}, ["=0.5"]),
        (
            {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5},
            ["=5", "(4)"],
        ),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}, ["[1, 8, 4]", "(3)"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [8, 9, 1]]}, ["that rise"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": 7}, ["=7"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": ["abc"]}, ["['abc']"]),
    ],
)
def test_invalid_settings_are_named(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        facts(config)
    assert [word for word in words if word not in str(error.value)] == []


def test_key_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="method is given twice.*spec_method"):
        facts(NGRAM, spec_method="ngram")


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft_model"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": None, "model_type": "deepseek_mtp"}, "mtp"),
        ({"model_type": "medusa"}, "medusa"),
    ],
)
def test_draft_model_method_is_detected_from_its_config(draft: dict[str, Any], method: str) -> None:
    """Check that the refusal names the detected method."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            SpecFacts.of.__globals__["UNSUPPORTED"]["speculative key"], "speculative_config.method", (method,)
        )
        assert facts({"model": "x", "num_speculative_tokens": 2}, draft).method == method
        assert facts({"model": "x"}, {**draft, "n_predict": 7}).num_speculative_tokens == 7


def test_mtp_names_are_mapped() -> None:
    assert facts({"method": "qwen3_next_mtp", "num_speculative_tokens": 1}).method == "mtp"


def test_batch_sizes_limit_the_drafts() -> None:
    spec = facts({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 1], [17, 99, 0]]})
    assert [spec.most(size) for size in (1, 4, 5, 16, 17, 100)] == [3, 3, 1, 1, 0, 3]


def test_synthetic_acceptance_length_becomes_rates() -> None:
    spec = facts({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5})
    first, second, third = spec.synthetic_acceptance_rates
    assert abs(1 + first + second + third - 2.5) < 1e-9 and abs(second - first**2) < 1e-9
    most = facts({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4})
    assert most.synthetic_acceptance_rates == (1, 1, 1)
