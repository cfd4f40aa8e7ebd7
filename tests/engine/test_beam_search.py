"""Tests of beam search against an implementation on transformers' logits."""

import pytest
from tiny_text import EOS, TextModel, open_text, text_model, variant

from quire import LLM, BeamSearchParams, SamplingParams
from quire.data.outputs import BeamSearchOutput
from quire.errors import RequestError

PROMPTS = [[1, 40, 300, 77], [1, 55], [9, 9, 9, 200, 31]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model)


Beam = tuple[list[int], float, bool]
"""Tokens with the prompt, sum of logprobs, and whether eos ended the beam."""


def tokens_of(output: BeamSearchOutput) -> list[list[int]]:
    return [beam.tokens for beam in output.sequences]


def search(
    model: TextModel, prompt: list[int], params: BeamSearchParams, eos: int
) -> list[tuple[list[int], float]]:
    """Score the best 2 * width tokens of every beam; beams that end with eos are stored without it."""

    def score(beam: Beam) -> float:
        return float(beam[1] / len(beam[0]) ** params.length_penalty)

    live: list[Beam] = [(prompt, 0.0, False)]
    done: list[Beam] = []
    for _ in range(params.max_tokens):
        grown: list[Beam] = []
        for tokens, total, _ended in live:
            row = model.logprobs(tokens)[-1]
            for id in row.topk(2 * params.beam_width).indices.tolist():
                if id == eos and not params.ignore_eos:
                    done.append((tokens, total + row[id].item(), True))
                else:
                    grown.append(([*tokens, id], total + row[id].item(), False))
        live = sorted(grown, key=score, reverse=True)[: params.beam_width]
    best = sorted(done + live, key=score, reverse=True)[: params.beam_width]
    return [(tokens, total) for tokens, total, _ in best]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_beams_match_the_reference_search(
    llm: LLM, model: TextModel, width: int, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=5, length_penalty=length_penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected = search(model, prompt, params, EOS)
        assert tokens_of(output) == [tokens for tokens, _ in expected]
        for beam, (_, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert len(beam.logprobs) == 5 and beam.finish_reason == "length"
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)


@pytest.fixture(scope="module")
def ending(model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, int]:
    """Open an engine whose eos is a likely token, so that beams end at different lengths."""
    eos = int(model.logprobs(PROMPTS[0])[-1].topk(2).indices[1])
    token = open_text(model).get_tokenizer().convert_ids_to_tokens(eos)
    files = {"tokenizer_config": {"eos_token": token}, "generation_config": {}}
    return open_text(variant(model, tmp_path_factory.mktemp("ending"), **files)), eos


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_that_end_with_eos_are_kept(
    ending: tuple[LLM, int], model: TextModel, width: int, length_penalty: float
) -> None:
    llm, eos = ending
    params = BeamSearchParams(beam_width=width, max_tokens=4, length_penalty=length_penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected = search(model, prompt, params, eos)
        assert tokens_of(output) == [tokens for tokens, _ in expected]
        for beam in output.sequences:
            ended = len(beam.tokens) < len(prompt) + 4
            assert (beam.finish_reason, beam.stop_reason) == (("stop", eos) if ended else ("length", None))


def test_eos_is_included_or_ignored(ending: tuple[LLM, int], model: TextModel) -> None:
    llm, eos = ending
    (plain,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(4, 4))
    (kept,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(4, 4, include_stop_str_in_output=True))
    reasons = [beam.finish_reason for beam in plain.sequences]
    assert "stop" in reasons and reasons == [beam.finish_reason for beam in kept.sequences]
    for short, full in zip(plain.sequences, kept.sequences, strict=True):
        assert full.tokens == short.tokens + ([eos] if short.finish_reason == "stop" else [])
    params = BeamSearchParams(4, 2, ignore_eos=True, length_penalty=0.0)
    (ignored,) = llm.beam_search(PROMPTS[:1], params)
    assert tokens_of(ignored) == [ids for ids, _ in search(model, PROMPTS[0], params, eos)]
    (first,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(4, 1, ignore_eos=True))
    assert any(beam.tokens[-1] == eos and beam.finish_reason == "length" for beam in first.sequences)


def test_single_beam_is_greedy(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, BeamSearchParams(1, 12)), strict=True):
        (answer,) = llm.generate(prompt, greedy, use_tqdm=False)
        assert output.sequences[0].tokens == prompt + list(answer.outputs[0].token_ids)


def test_concurrency_limit_does_not_change_beams(llm: LLM) -> None:
    params = BeamSearchParams(3, 4)
    together = llm.beam_search(PROMPTS, params)
    one_by_one = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    assert [tokens_of(item) for item in one_by_one] == [tokens_of(item) for item in together]
    texts = llm.beam_search([{"prompt": "A page"}, "A page"], params)
    assert tokens_of(texts[0]) == tokens_of(texts[1])


def test_search_ends_at_max_model_len(llm: LLM) -> None:
    (output,) = llm.beam_search([[9] * 253], BeamSearchParams(2, 50))
    assert [len(beam.tokens) for beam in output.sequences] == [256, 256]


def test_beam_width_may_exceed_max_logprobs_but_not_the_vocabulary(llm: LLM) -> None:
    assert len(llm.beam_search([[9]], BeamSearchParams(30, 2))[0].sequences) == 30
    with pytest.raises(RequestError, match="Requested sample logprobs of 400"):
        llm.beam_search([[9]], BeamSearchParams(200, 2))
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.wait_for_completion(use_tqdm=False) == []
