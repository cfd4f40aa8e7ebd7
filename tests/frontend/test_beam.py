"""Tests of the beam search bookkeeping with handwritten probabilities."""

import math

import pytest

from quire.data.outputs import Logprob
from quire.data.params import BeamSearchParams
from quire.frontend.beam import BeamSearch, round_params

EOS = 9


def chances(**by_token: float) -> dict[int, Logprob]:
    return {int(token[1:]): Logprob(math.log(chance)) for token, chance in by_token.items()}


def search(width: int = 2, max_len: int = 100, **fields: object) -> BeamSearch:
    params = BeamSearchParams(**({"beam_width": width, "max_tokens": 3} | fields))  # type: ignore[arg-type]
    return BeamSearch([1], params, eos_id=EOS, max_len=max_len)


def test_worse_start_may_win() -> None:
    """Check that more than the best beam is kept at each step."""
    beams = search()
    beams.advance([chances(t5=0.6, t6=0.4)])
    assert [beam.tokens for beam in beams.live] == [[1, 5], [1, 6]]
    beams.advance([chances(t2=0.3, t3=0.2), chances(t4=0.9, t7=0.1)])
    assert [beam.tokens for beam in beams.live] == [[1, 6, 4], [1, 5, 2]]
    assert beams.live[0].cum_logprob == pytest.approx(math.log(0.36))


def test_eos_ends_a_beam_and_frees_its_place() -> None:
    beams = search()
    beams.advance([chances(t9=0.5, t5=0.3, t6=0.2)])
    assert [beam.tokens for beam in beams.live] == [[1, 5], [1, 6]]
    (done,) = beams.done
    assert (done.tokens, done.finish_reason, done.stop_reason) == ([1], "stop", EOS)


def test_length_penalty_decides_between_short_and_long() -> None:
    def best(penalty: float) -> list[int]:
        beams = search(width=1, length_penalty=penalty)
        beams.advance([chances(t9=0.3, t5=0.7)])
        beams.advance([chances(t6=0.35, t7=0.3)])
        return beams.best()[0].tokens

    assert best(0.0) == [1] and best(2.0) == [1, 5, 6]


def test_included_eos_does_not_count_as_length() -> None:
    plain, kept = search(), search(include_stop_str_in_output=True)
    for beams in (plain, kept):
        beams.advance([chances(t9=0.5, t5=0.3)])
    assert kept.done[0].tokens == [1, EOS]
    assert plain.score(plain.done[0]) == kept.score(kept.done[0])


@pytest.mark.parametrize(("max_len", "rounds"), [(100, 3), (3, 2), (2, 1)])
def test_search_ends_at_max_tokens_or_max_model_len(max_len: int, rounds: int) -> None:
    beams, count = search(max_len=max_len), 0
    while not beams.finished:
        beams.advance([chances(t5=0.6, t6=0.4) for _ in beams.live])
        count += 1
    assert count == rounds and {beam.finish_reason for beam in beams.best()} == {"length"}


def test_search_ends_when_all_beams_have_ended() -> None:
    beams = search()
    beams.advance([chances(t9=1.0)])
    assert beams.finished and len(beams.best()) == 1


def test_each_round_requests_twice_the_beam_width() -> None:
    params = round_params(BeamSearchParams(beam_width=3, max_tokens=7, temperature=0.5))
    assert (params.logprobs, params.max_tokens, params.temperature, params.ignore_eos) == (6, 1, 0.5, True)
