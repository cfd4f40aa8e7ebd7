"""Beam search through the engine, against one that is written out here on transformers' logits."""

import pytest
from tiny_text import EOS, TextModel, open_text, text_model

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError

PROMPTS = [[1, 40, 300, 77], [1, 55], [9, 9, 9, 200, 31]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model)


Beam = tuple[list[int], float, bool]
"""Tokens with the prompt, sum of logprobs, whether eos ended it."""


def search(model: TextModel, prompt: list[int], params: BeamSearchParams, eos: int) -> list[tuple[list[int], float]]:
    """Every continuation of every beam is scored; no shortcut. Finished beams are kept aside without their eos."""

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
def test_the_beams_are_those_of_a_search_written_out(
    llm: LLM, model: TextModel, width: int, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=5, length_penalty=length_penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected = search(model, prompt, params, EOS)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (_, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert len(beam.logprobs) == 5 and beam.finish_reason == "length"
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_that_meet_eos_are_done(model: TextModel, width: int) -> None:
    """A token that is likely stands in for eos, so that beams end at different lengths."""
    eos = int(model.logprobs(PROMPTS[0])[-1].topk(3).indices[1])
    llm = open_text(model, hf_overrides={"eos_token_id": eos}, generation_config="vllm")
    llm.config.checkpoint.__class__
    params = BeamSearchParams(beam_width=width, max_tokens=4)
    if llm.config.checkpoint.eos_ids[0] != eos:
        pytest.fail(f"eos is {llm.config.checkpoint.eos_ids}")
    (output,) = llm.beam_search(PROMPTS[:1], params)
    assert [beam.tokens for beam in output.sequences] == [ids for ids, _ in search(model, PROMPTS[0], params, eos)]
