"""Tests of output objects and flat logprobs."""

import logging

import pytest

from quire.data.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestOutput,
    RequestStateStats,
)
from quire.logs import warn_once

POSITIONS = [
    None,
    {5: Logprob(-0.1, 1, "a"), 7: Logprob(-2.0, 2, "b")},
    {9: Logprob(-0.5, 4, None)},
]


def completion(finish_reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(0, "hi", [1, 2], -0.3, None, finish_reason=finish_reason)


def test_completion_is_finished_only_with_a_reason() -> None:
    assert not completion().finished()
    assert completion("length").finished()


def test_reprs_show_the_text_and_hide_internal_fields() -> None:
    shown = repr(completion("stop"))
    assert "text='hi'" in shown and "finish_reason='stop'" in shown and "routed_experts" not in shown
    output = RequestOutput("r1", "p", [1], None, [completion()], False)
    assert "request_id='r1'" in repr(output) and "text='hi'" in repr(output)


def test_unknown_arguments_of_a_request_output_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    logger = logging.getLogger("quire.data.outputs")
    logger.addHandler(caplog.handler)
    try:
        output = RequestOutput("r1", None, [1], None, [], True, num_cached_tokens=3, from_the_future=1)
    finally:
        logger.removeHandler(caplog.handler)
    assert "from_the_future" in caplog.text
    assert output.num_cached_tokens == 3 and not hasattr(output, "from_the_future")


def test_optional_fields_of_a_request_output_are_none() -> None:
    output = RequestOutput("r1", None, [1], None, [], True)
    names = ("metrics", "lora_request", "encoder_prompt", "encoder_prompt_token_ids", "num_cached_tokens",
             "num_cache_creation_tokens", "kv_transfer_params", "ec_transfer_params")  # fmt: skip
    assert [getattr(output, name) for name in names] == [None] * len(names)


def test_flat_logprobs_equal_their_list_of_dicts() -> None:
    flat = FlatLogprobs()
    flat.extend(POSITIONS)
    assert len(flat) == 3
    assert list(flat) == POSITIONS
    assert flat[-1] == POSITIONS[-1]
    with pytest.raises(IndexError):
        flat[3]


def test_slice_of_flat_logprobs_is_independent() -> None:
    flat = FlatLogprobs()
    flat.extend(POSITIONS)
    part = flat[1:]
    part.append({1: Logprob(-1.0)})
    assert list(part) == [*POSITIONS[1:], {1: Logprob(-1.0)}]
    assert list(flat) == POSITIONS


def test_columns_append_as_one_position() -> None:
    flat = FlatLogprobs()
    flat.append_fast([5, 7], [-0.1, -2.0], [1, 2], ["a", "b"])
    assert flat[0] == POSITIONS[1]
    with pytest.raises(AssertionError):
        flat.append_fast([5, 7], [-0.1], [1, 2], ["a", "b"])


def test_stats_and_beams_start_empty() -> None:
    stats = RequestStateStats()
    assert (stats.num_generation_tokens, stats.is_corrupted, stats.first_token_latency) == (0, False, 0.0)
    beam = BeamSearchSequence(tokens=[1], logprobs=[])
    assert (beam.cum_logprob, beam.text, beam.finish_reason, beam.stop_reason) == (0.0, None, None, None)
    assert BeamSearchOutput([beam]).sequences == [beam]
