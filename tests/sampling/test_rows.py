"""Tests of SamplingRows and its tables: the entries of a request, and their removal."""

import numpy as np
import torch

from quire.data.params import SamplingParams
from quire.sampling.rows import LISTED, LOGPROBS, RANDOM, History, SamplingRows, TokenTable, WordTable

EVERYTHING = SamplingParams(
    temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, presence_penalty=1.0, frequency_penalty=1.0,
    repetition_penalty=1.1, logit_bias={1: 2.0}, allowed_token_ids=[1, 2, 3], min_tokens=4,
    bad_words_token_ids=[[1], [2, 3, 4]], logprob_token_ids=[5, 6],
)  # fmt: skip


def rows() -> SamplingRows:
    return SamplingRows(max_rows=4, vocab=10, device=torch.device("cpu"))


def places(*at: int) -> np.ndarray:
    return np.array(at, np.int32)


def test_table_returns_the_entries_of_the_batch_in_order() -> None:
    table = TokenTable()
    table.add(2, [7, 3], [0.5, 0.25])
    table.add(0, [1])
    at, token_ids, values = table.select(places(-1, -1, 5))
    assert (at.tolist(), token_ids.tolist(), values.tolist()) == ([5, 5], [7, 3], [0.5, 0.25])


def test_table_grows_and_removes_entries() -> None:
    """Check that no entries are lost when the table grows or another row is dropped."""
    table = TokenTable()
    for row in range(50):
        table.add(row, range(row, row + 7), float(row))
    for row in range(0, 50, 2):
        table.drop(row)
    assert len(table) == 25 * 7
    at, token_ids, values = table.select(np.arange(50, dtype=np.int32))
    assert at.tolist() == [row for row in range(1, 50, 2) for _ in range(7)]
    assert token_ids.tolist() == [row + i for row in range(1, 50, 2) for i in range(7)]
    assert values.tolist() == at.tolist()


def words_banned(table: WordTable, tokens: list[int], prompt_len: int) -> list[int]:
    padded = np.array([[0] * 8, tokens + [0] * (8 - len(tokens))], np.int32)
    lens = np.array([0, len(tokens)], np.int32)
    at, token_ids = table.select(places(-1, 3), History(padded, lens, np.array([0, prompt_len], np.int32)))
    assert (at == 3).all()
    return sorted(token_ids.tolist())


def test_bad_word_is_banned_at_its_last_token_after_its_first_tokens() -> None:
    table = WordTable()
    table.add(1, [[9], [1, 2], [5, 1, 3]])
    table.add(0, [[4]])
    assert words_banned(table, [], 0) == [9]
    assert words_banned(table, [7, 1], 0) == [2, 9]
    assert words_banned(table, [5, 1], 0) == [2, 3, 9]
    assert words_banned(table, [5, 1, 7], 0) == [9]


def test_bad_word_does_not_begin_in_the_prompt() -> None:
    table = WordTable()
    table.add(1, [[1, 2], [5, 1, 3]])
    assert words_banned(table, [5, 1], 2) == []
    assert words_banned(table, [5, 1], 1) == [2]


def test_zeros_before_the_start_do_not_complete_a_bad_word() -> None:
    table = WordTable()
    table.add(1, [[0, 0, 6]])
    assert words_banned(table, [0], 0) == []
    assert words_banned(table, [0, 0], 0) == [6]


def test_dropped_bad_word_is_gone_and_the_rest_still_match() -> None:
    """Check the alignment of prefixes when the longest word is removed."""
    table = WordTable()
    table.add(0, [[1, 2, 3, 4, 5]])
    table.add(1, [[5, 1, 3], [8]])
    table.drop(0)
    assert len(table) == 2
    assert words_banned(table, [5, 1], 0) == [3, 8]


def test_release_removes_all_entries() -> None:
    state = rows()
    state.admit(1, EVERYTHING, prompt_len=2, seed=-5, stop_ids=[9])
    state.release(1)
    assert not state.flags.any()
    assert [len(t) for t in (state.allowed, state.held, state.biased, state.listed, state.banned)] == [0] * 5


def test_second_request_in_a_row_inherits_nothing() -> None:
    """Check columns that admission must also write for disabled features."""
    used, fresh = rows(), rows()
    used.admit(1, EVERYTHING, prompt_len=2, seed=1, stop_ids=[9])
    for state in (used, fresh):
        state.admit(1, SamplingParams(), prompt_len=3, seed=7, stop_ids=[9])
    for name, column in vars(fresh).items():
        if isinstance(column, np.ndarray) and name not in ("num_logprobs", "_places", "admission"):
            assert getattr(used, name).tolist() == column.tolist(), name
    assert int(used.flags[1]) == RANDOM
    assert len(used.held) == 0


def test_releasing_one_row_keeps_the_others() -> None:
    state = rows()
    state.admit(0, EVERYTHING, prompt_len=2, seed=1, stop_ids=[9])
    state.admit(1, EVERYTHING, prompt_len=2, seed=1, stop_ids=[9])
    state.release(0)
    assert len(state.allowed) == 3 and len(state.banned) == 2 and len(state.held) == 1
    assert state.flags[1] and not state.flags[0]


def test_numbers_of_logprobs() -> None:
    state = rows()
    for row, wanted in enumerate((0, 3, -1)):
        state.admit(row, SamplingParams(logprobs=wanted), prompt_len=1, seed=0, stop_ids=[])
    assert state.num_logprobs.tolist()[:3] == [0, 3, 10]
    state.admit(0, SamplingParams(logprob_token_ids=[4]), prompt_len=1, seed=0, stop_ids=[])
    assert state.flags[0] & LOGPROBS and state.flags[0] & LISTED


def test_stop_ids_outside_the_vocabulary_are_ignored() -> None:
    """Check a stop id beyond the logits, which must not fail the batch."""
    state = rows()
    state.admit(0, SamplingParams(min_tokens=2), prompt_len=1, seed=0, stop_ids=[10, 2**40])
    assert len(state.held) == 0 and not state.flags[0] & ~RANDOM
