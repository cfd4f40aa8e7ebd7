"""Tests of SamplingParams: every validation rule has a failing case."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.data.params import (
    MAX_PATTERN_SIZE,
    MAX_STOP_TOKEN_IDS,
    BeamSearchParams,
    ReasoningIds,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.errors import RequestError

NAN, INF = math.nan, math.inf

REJECTED: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 16385, "2", True, 1.0, None)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF, "1", True, None)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, -INF, [1.0])),
    *(("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF, "x")),
    *(("temperature", value) for value in (-0.1, 2.1, NAN, INF, "0.8", False)),
    *(("top_p", value) for value in (0.0, -0.5, 1.1, NAN, "0.9")),
    *(("top_k", value) for value in (-2, 1.5, "5", True)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1", True)),
    *(("stop", value) for value in ("", ["a", ""], [1], {"a": 1}, 3)),
    *(("stop_token_ids", value) for value in ([-1], ["1"], [1.0], [True], "12", 5, {1: 2})),
    ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS + 1))),
    *(("max_tokens", value) for value in (0, -1, "16", 1.5, 10**30)),
    *(("min_tokens", value) for value in (-1, 17, "1")),
    *(("logprobs", value) for value in (-2, "1", 1.5, False)),
    *(("prompt_logprobs", value) for value in (-2, "1", False)),
    *(("logprob_token_ids", value) for value in (list(range(129)), [-1], ["a"], 3)),
    *(("ignore_eos", value) for value in ("yes", 1, None)),
    *((name, 0) for name in ("flat_logprobs", "detokenize", "skip_special_tokens", "skip_clone")),
    *((name, "x") for name in ("spaces_between_special_tokens", "include_stop_str_in_output")),
    *(("output_kind", value) for value in (0, "DELTA")),
    *(("stream_interval", value) for value in (0, -1, "1")),
    *(("structured_outputs", value) for value in ("json", {}, {"jsonn": "{}"}, {"regex": "a", "json": "{}"})),
    ("structured_outputs", {"choice": "yes"}),
    *(("logit_bias", value) for value in ({"1": 1.0}, {1: NAN}, {1: INF}, {1: "2"}, [1], {1.5: 1.0})),
    *(("allowed_token_ids", value) for value in ([], [-1], ["1"])),
    *(("bad_words", value) for value in ("", ["a", ""], [1], ["w"] * 129)),
    ("extra_args", [1]),
    ("extra_args", {"a": 10**30}),
    ("extra_args", {"kv_cache_report_mode": "all"}),
    ("skip_reading_prefix_cache", "no"),
    *(("thinking_token_budget", value) for value in (-2, "1", True)),
    *(("repetition_detection", value) for value in ({"max_pattern_size": 4}, {"pattern": 1}, 3)),
    *(("routed_experts_prompt_start", value) for value in (-1, "1")),
    ("trace_decode_token_ids", [-1]),
]


@pytest.mark.parametrize(("name", "value"), REJECTED, ids=lambda v: str(v)[:20])
def test_invalid_value_is_a_request_error_that_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


EDGES: list[dict[str, Any]] = [
    {"n": 16384}, {"presence_penalty": -2}, {"frequency_penalty": 2.0}, {"repetition_penalty": 0.01},
    {"temperature": 2}, {"top_p": 1e-9}, {"top_k": -1}, {"min_p": 1.0}, {"seed": 2**63 - 1}, {"seed": 0},
    {"max_tokens": None, "min_tokens": 1000}, {"max_tokens": 5, "min_tokens": 5}, {"logprobs": -1},
    {"logprobs": 0}, {"prompt_logprobs": -1}, {"logprob_token_ids": [3, 4], "logprobs": 2},
    {"logprob_token_ids": list(range(128))}, {"thinking_token_budget": 0}, {"extra_args": {"a": [1]}},
    {"bad_words": ["w"] * 128}, {"stream_interval": 1}, {"logit_bias": {}},
]  # fmt: skip


@pytest.mark.parametrize("fields", EDGES, ids=str)
def test_limits_of_each_range_are_allowed(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == value


def test_defaults_match_vllm() -> None:
    """Check that no default changes silently."""
    params = SamplingParams()
    expected: dict[str, Any] = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [],
        "stop_token_ids": [], "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None,
        "prompt_logprobs": None, "logprob_token_ids": None, "flat_logprobs": False, "detokenize": True,
        "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "output_kind": RequestOutputKind.CUMULATIVE,
        "stream_interval": None, "skip_clone": False,
        "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None, "bad_words": [],
        "extra_args": None, "skip_reading_prefix_cache": False, "thinking_token_budget": None,
        "repetition_detection": None, "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
        "bad_words_token_ids": None,
        "reasoning": None, "timestamps": False, "timestamp_tokens": None,
        "aligning": None,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in params.__struct_fields__} == expected
    assert list(expected) == list(params.__struct_fields__)


def test_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_greedy_disables_the_random_filters() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.1)
    assert (params.top_p, params.top_k, params.min_p, params.greedy) == (1.0, 0, 0.0, True)
    assert not SamplingParams(temperature=1e-6).greedy


def test_greedy_with_several_completions_is_rejected() -> None:
    with pytest.raises(RequestError, match="n must be 1 when using greedy sampling"):
        SamplingParams(n=2, temperature=0.0)


def test_tiny_temperature_is_raised() -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01


@pytest.mark.parametrize(
    ("values", "name", "kept"),
    [
        ({"seed": -1}, "seed", None),
        ({"stop": "a"}, "stop", ["a"]),
        ({"stop": ("a", "b")}, "stop", ["a", "b"]),
        ({"stop_token_ids": [3, 1, 3]}, "stop_token_ids", [3, 1]),
        ({"logprobs": True}, "logprobs", 1),
        ({"prompt_logprobs": True}, "prompt_logprobs", 1),
        ({"prompt_logprobs": 0}, "skip_reading_prefix_cache", True),
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache", False),
        ({"thinking_token_budget": -1}, "thinking_token_budget", None),
        ({"top_k": np.int64(4)}, "top_k", 4),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"allowed_token_ids": np.array([1, 2])}, "allowed_token_ids", [1, 2]),
    ],
    ids=str,
)
def test_values_are_normalized(values: dict[str, Any], name: str, kept: Any) -> None:
    value = getattr(SamplingParams(**values), name)
    assert value == kept
    assert type(value) is type(kept)


def test_stop_strings_without_detokenization_are_rejected() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_listed_logprobs_must_agree_with_their_number() -> None:
    with pytest.raises(RequestError, match="logprobs must equal"):
        SamplingParams(logprobs=3, logprob_token_ids=[1, 2])


def test_from_optional_maps_null_to_defaults_except_max_tokens() -> None:
    assert SamplingParams.from_optional(n=None, temperature=None, stop=None) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None


def test_from_optional_converts_and_clamps_logit_bias() -> None:
    params = SamplingParams.from_optional(logit_bias={"5": 200, "6": -200.0, 7: 1})
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}


@pytest.mark.parametrize("bias", [{"x": 1.0}, {"1": NAN}, {"1": "2"}, [1], {INF: 1.0}], ids=str)
def test_from_optional_rejects_an_invalid_bias(bias: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_optional(logit_bias=bias)
    assert caught.value.param == "logit_bias"


FULL = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=5, seed=3, stop=["x"], stop_token_ids=[1], logprobs=2,
    prompt_logprobs=1, output_kind=RequestOutputKind.DELTA, logit_bias={4: 1.5}, allowed_token_ids=[4, 5],
    bad_words=["no"], bad_words_token_ids=[[1, 2]], extra_args={"k": {"a": 1}}, max_tokens=None,
    structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2),
)  # fmt: skip


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), FULL], ids=["plain", "greedy", "full"]
)
def test_serialization_round_trip(params: SamplingParams) -> None:
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params


def test_clone_is_deep_by_default() -> None:
    copy = FULL.clone()
    assert copy == FULL and copy is not FULL
    assert copy.logit_bias is not None and FULL.logit_bias is not None
    copy.logit_bias[4] = 0.0
    assert FULL.logit_bias[4] == 1.5
    shared = SamplingParams(skip_clone=True)
    assert shared.clone() is shared


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [0, 100]}, "allowed_token_ids"),
        ({"logprob_token_ids": [100]}, "logprob_token_ids"),
        ({"bad_words_token_ids": [[1, 100]]}, "bad_words"),
        ({"bad_words_token_ids": [[1]] * 129}, "bad_words"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning": ReasoningIds((1,), (100,), False)}, "reasoning"),
        ({"reasoning": ReasoningIds((1,), (), False)}, "reasoning"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
    ],
    ids=str,
)
def test_verify_rejects_what_the_model_does_not_support(fields: dict[str, Any], param: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(RequestError) as caught:
        params.verify(vocab=100, max_logprobs=20)
    assert caught.value.param == param


def test_verify_accepts_the_rest() -> None:
    SamplingParams(
        logprobs=20, prompt_logprobs=20, logit_bias={99: 1.0}, allowed_token_ids=[0, 99],
        stop_token_ids=[99], extra_args={"a": 1}, bad_words_token_ids=[[99]] * 128,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=1, min_count=2),
    ).verify(vocab=100, max_logprobs=20)  # fmt: skip
    SamplingParams(logprobs=-1).verify(vocab=100, max_logprobs=-1)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"json": ""}, {"choice": []}, {"choice": [1]}, {"grammar": " "}, {"json_object": False},
        {"regex": "a\0"}, {"regex": 3}, {"regex": "a", "choice": ["a"]}, {"json": 3},
        {"regex": "a", "disable_any_whitespace": "x"}, {"regex": "a", "whitespace_pattern": 2},
    ],
    ids=str,
)  # fmt: skip
def test_structured_outputs_need_exactly_one_valid_constraint(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"json": {}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a"]}, {"json_object": True}],
    ids=str,
)
def test_structured_outputs_accept_one_constraint(fields: dict[str, Any]) -> None:
    StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": -1}, {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 1}, {"max_pattern_size": "2", "min_count": 2},
        {"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2}, {"max_pattern_size": 2**70},
    ],
    ids=str,
)  # fmt: skip
def test_repetition_detection_rejects_invalid_sizes(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        RepetitionDetectionParams(**fields)
    assert caught.value.param == "repetition_detection"


@pytest.mark.parametrize(
    "fields",
    [{"beam_width": 0}, {"max_tokens": 0}, {"temperature": -1}, {"length_penalty": NAN}, {"ignore_eos": 1}],
    ids=str,
)
def test_beam_search_rejects_invalid_values(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **fields})
