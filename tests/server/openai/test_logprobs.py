"""Tests of logprob formats that the tests of the routes do not cover."""

import math
from types import SimpleNamespace
from typing import Any

from fake_engine import byte_tokenizer

from quire.data.outputs import Logprob
from quire.server.openai.logprobs import LogprobColumns, TokenFormatter, chat_logprobs, prompt_logprobs
from quire.server.openai.requested_model import RequestedModel

POSITION = {5: Logprob(-2.0, 3, "f"), 1: Logprob(-0.1, 1, "b"), 2: Logprob(-math.inf, 2, "c")}


def test_chat_top_logprobs_may_omit_the_sampled_token() -> None:
    (entry,) = chat_logprobs([5], [POSITION], 1, TokenFormatter(byte_tokenizer()))["content"]
    assert entry["logprob"] == -2.0 and [top["token"] for top in entry["top_logprobs"]] == ["b"]
    (entry,) = chat_logprobs([5], [POSITION], -1, TokenFormatter(None))["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -2.0, -9999.0]
    assert entry["bytes"] == [ord("f")]


def test_completion_offsets_count_characters_and_columns_reset() -> None:
    columns = LogprobColumns(1, TokenFormatter(byte_tokenizer(), as_ids=True))
    columns.add([5, 5], [None, POSITION])
    popped = columns.pop()
    assert popped["text_offset"] == [0, len("token_id:5")] and popped["tokens"] == ["token_id:5"] * 2
    assert popped["top_logprobs"] == [None, {"token_id:5": -2.0, "token_id:1": -0.1}]
    assert columns.pop()["tokens"] == []


def test_prompt_logprobs_are_finite() -> None:
    assert prompt_logprobs(None) is None
    logprobs = prompt_logprobs([None, POSITION])
    assert logprobs is not None and logprobs[0] is None and logprobs[1] is not None
    assert logprobs[1]["2"] == {"logprob": -9999.0, "rank": 2, "decoded_token": "c"}


def test_tokens_without_a_tokenizer_are_shown_as_ids() -> None:
    """Check that the best tokens of a position do not share one key."""
    unused: Any = None
    inputs: Any = SimpleNamespace(tokenizer=None)
    model = RequestedModel("m", None, unused, inputs)
    columns = LogprobColumns(2, model.token_formatter(as_ids=False))
    columns.add([5], [{5: Logprob(-0.5, 1, None), 7: Logprob(-1.0, 2, None)}])
    assert columns.columns["top_logprobs"] == [{"token_id:5": -0.5, "token_id:7": -1.0}]
