"""Repetition detection runs in the engine loop for every token: its work is bounded for any output.

Guards against CVE-2024-8939 and CVE-2026-34756 (parameters of one request that take the time of all
others)."""

from typing import Any

import numpy as np
import pytest
from ask import chat, refused

from quire.data.params import MAX_PATTERN_SIZE, RepetitionDetectionParams, SamplingParams
from quire.data.repetition import RepetitionCounts
from quire.data.request import Request
from quire.sched.step_tokens import why_stopped


@pytest.mark.parametrize("size", [MAX_PATTERN_SIZE + 1, 10**6, 2**62])
def test_too_large_pattern_size_is_400(size: int) -> None:
    error = refused(chat(repetition_detection={"max_pattern_size": size, "min_count": 2}))
    assert error["param"] == "repetition_detection"
    assert f"at most {MAX_PATTERN_SIZE}" in error["message"] and "lower it" in error["message"]


def test_largest_pattern_size_is_accepted() -> None:
    detection = {"max_pattern_size": MAX_PATTERN_SIZE, "min_pattern_size": 1, "min_count": 2}
    assert chat(repetition_detection=detection).status_code == 200


class Watched(np.ndarray[Any, np.dtype[np.int32]]):
    """Output tokens that count how many of them are read."""

    num_read = 0

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Watched.num_read += sum(np.size(operand) for operand in inputs if isinstance(operand, Watched))
        plain = [operand.view(np.ndarray) if isinstance(operand, Watched) else operand for operand in inputs]
        return getattr(function, method)(*plain, **options)

    def tolist(self) -> Any:
        Watched.num_read += self.size
        return super().tolist()


def test_comparisons_per_token_do_not_grow_with_the_output() -> None:
    """In a random text of two tokens, half of the comparisons match at every pattern size: the worst case of
    the search."""
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


def test_full_recount_happens_only_after_a_jump_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count_all = RepetitionCounts._start_over
    monkeypatch.setattr(
        RepetitionCounts,
        "_start_over",
        lambda self, output: (counted.append(len(output)), count_all(self, output)),
    )
    counts = RepetitionCounts(RepetitionDetectionParams(max_pattern_size=9, min_count=99))
    tokens = np.arange(400, dtype=np.int32)
    for length in [*range(1, 100), *range(300, 400)]:
        counts.is_repetition(tokens[:length])
    assert counted == [300]
