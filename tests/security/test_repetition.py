"""Repetition detection runs in the core's loop for every token: its work is bounded, whatever the output is.

Guards against CVE-2024-8939 and CVE-2026-34756 (parameters of one request that take the time of all others).
"""

from typing import Any

import numpy as np
import pytest
from ask import chat, refused

from quire.data.params import MAX_PATTERN_SIZE, RepetitionDetectionParams, SamplingParams
from quire.data.repetition import RepetitionCounts
from quire.data.request import Request
from quire.sched.step_tokens import why_stopped


@pytest.mark.parametrize("size", [MAX_PATTERN_SIZE + 1, 10**6, 2**62])
def test_a_pattern_size_beyond_the_limit_is_400(size: int) -> None:
    error = refused(chat(repetition_detection={"max_pattern_size": size, "min_count": 2}))
    assert error["param"] == "repetition_detection"
    assert f"at most {MAX_PATTERN_SIZE}" in error["message"] and "lower it" in error["message"]


def test_the_largest_pattern_size_is_taken() -> None:
    detection = {"max_pattern_size": MAX_PATTERN_SIZE, "min_pattern_size": 1, "min_count": 2}
    assert chat(repetition_detection=detection).status_code == 200


class Watched(np.ndarray[Any, np.dtype[np.int32]]):
    """An output that counts the tokens that are looked at."""

    num_read = 0

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Watched.num_read += sum(np.size(each) for each in inputs if isinstance(each, Watched))
        plain = [each.view(np.ndarray) if isinstance(each, Watched) else each for each in inputs]
        return getattr(function, method)(*plain, **options)

    def tolist(self) -> Any:
        Watched.num_read += self.size
        return super().tolist()


def test_a_token_is_compared_with_as_many_as_there_are_sizes_however_long_the_output() -> None:
    """Random text of two tokens, of which every size matches half: the worst case of a search."""
    detection = RepetitionDetectionParams(max_pattern_size=64, min_pattern_size=32, min_count=2)
    request = Request(
        id="a",
        tokens=[1],
        params=SamplingParams(max_tokens=None, repetition_detection=detection),
        prompt_len=1,
        limit=10**6,
        seed=0,
    )
    request.prepare_stops()
    tokens = np.random.default_rng(0).integers(0, 2, 5000).astype(np.int32).view(Watched)
    for length in range(2, len(tokens)):
        Watched.num_read = 0
        assert why_stopped(request, tokens[:length]) is None
        assert Watched.num_read <= 4 * 64, f"{Watched.num_read} tokens were read at length {length}"


def test_counting_from_the_start_happens_only_when_the_output_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count_all = RepetitionCounts._count_all
    monkeypatch.setattr(
        RepetitionCounts,
        "_count_all",
        lambda self, output: (counted.append(len(output)), count_all(self, output)),
    )
    counts = RepetitionCounts(RepetitionDetectionParams(max_pattern_size=9, min_count=99))
    tokens = np.arange(400, dtype=np.int32)
    for length in [*range(1, 100), *range(300, 400)]:
        counts.is_repetition(tokens[:length])
    assert counted == [300]
