"""Logprob formats beyond what the routes' tests show."""

import math

from fake_engine import byte_tokenizer

from quire.data.outputs import Logprob
from quire.server.openai.logprobs import LogprobColumns, TokenFormatter, chat_logprobs, prompt_logprobs

POSITION = {5: Logprob(-2.0, 3, "f"), 1: Logprob(-0.1, 1, "b"), 2: Logprob(-math.inf, 2, "c")}


def test_chat_shows_the_likeliest_even_if_the_chosen_is_not_among_them() -> None:
    (entry,) = chat_logprobs([5], [POSITION], 1, TokenFormatter(byte_tokenizer()))["content"]
    assert entry["logprob"] == -2.0 and [top["token"] for top in entry["top_logprobs"]] == ["b"]
    (entry,) = chat_logprobs([5], [POSITION], -1, TokenFormatter(None))["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -2.0, -9999.0]
    assert entry["bytes"] == [ord("f")]


def test_completions_count_offsets_in_characters_and_start_again_empty() -> None:
    columns = LogprobColumns(1, TokenFormatter(byte_tokenizer(), as_ids=True))
    columns.add([5, 5], [None, POSITION])
    taken = columns.take()
    assert taken["text_offset"] == [0, len("token_id:5")] and taken["tokens"] == ["token_id:5"] * 2
    assert taken["top_logprobs"] == [None, {"token_id:5": -2.0, "token_id:1": -0.1}]
    assert columns.take()["tokens"] == []


def test_prompt_logprobs_have_no_infinity() -> None:
    assert prompt_logprobs(None) is None
    found = prompt_logprobs([None, POSITION])
    assert found is not None and found[0] is None and found[1] is not None
    assert found[1]["2"] == {"logprob": -9999.0, "rank": 2, "decoded_token": "c"}
