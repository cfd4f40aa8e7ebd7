"""Prompts as vectors, through the whole engine: they say what the same prompts say as token ids."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny
from saved import sent
from tiny import generate_preempted, logits_of, open_tiny, prompts_of
from torch import Tensor

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput
from quire.errors import RequestError

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 5},
    "gpt2": {},
    "qwen3_next": {},
}
"""Plain, with embeddings that are scaled and windows, with learned positions, with a state."""
SETTINGS: dict[str, Any] = {"enable_prompt_embeds": True, "max_model_len": 64, "max_num_seqs": 6}
PROMPTS = prompts_of(21, 1, 17, 30, 5, 1)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: make_tiny(family, tmp_path_factory.mktemp("embeds"), **FAMILIES[family]))


def vectors(hf: Any, ids: list[int]) -> Tensor:
    """As they go into the first layer; those of Gemma are scaled by then."""
    found: Tensor = hf.get_input_embeddings()(torch.tensor(ids)).detach()
    return found


def some_as_vectors(hf: Any, prompts: list[list[int]]) -> list[Any]:
    """Every second one stays as it is."""
    return [ids if place % 2 else {"prompt_embeds": vectors(hf, ids)} for place, ids in enumerate(prompts)]


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert torch.allclose(logits_of(ours), logits_of(theirs), atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_tokens_say_what_the_tokens_say(family: str, models: Any) -> None:
    """Whole, in chunks beside decodes, alone, and prompts of one token, which look like decodes."""
    path, hf = models(family)
    expected = open_tiny(path, max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
    llm = open_tiny(path, max_num_batched_tokens=16, **SETTINGS)
    for asked in (some_as_vectors(hf, PROMPTS), [{"prompt_embeds": vectors(hf, ids)} for ids in PROMPTS]):
        check_same(llm.generate(asked, PARAMS, use_tqdm=False), expected)
    for place in range(2):
        asked = {"prompt_embeds": sent(vectors(hf, PROMPTS[place]))}
        check_same(llm.generate(asked, PARAMS, use_tqdm=False), [expected[place]])


@pytest.mark.parametrize("sharing", [True, False], ids=["prefixes", "no prefixes"])
def test_a_preempted_request_has_its_vectors_again(sharing: bool, models: Any) -> None:
    path, hf = models("llama")
    expected = open_tiny(path, max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
    llm = open_tiny(path, max_num_batched_tokens=16, enable_prefix_caching=sharing, **SETTINGS)
    found = generate_preempted(llm, some_as_vectors(hf, PROMPTS), 8, at=(1, 3, 4, 6, 9))
    check_same(found, expected)
    assert llm.llm_engine.core.scheduler.num_preemptions == 5


def test_prefixes_are_shared_by_what_the_vectors_are(models: Any) -> None:
    """Catches the zeros that stand for their tokens being taken for a prefix."""
    path, hf = models("llama")
    llm = open_tiny(path, **SETTINGS)
    first, other = vectors(hf, PROMPTS[0]), vectors(hf, prompts_of(21, seed=9)[0])
    mixed = torch.cat([first[:8], other[8:]])

    def num_cached(prompt: Any) -> int | None:
        return llm.generate(prompt, PARAMS, use_tqdm=False)[0].num_cached_tokens

    asked = [[0] * 21, *({"prompt_embeds": each} for each in (first, other, mixed, first, first.half()))]
    assert [num_cached(each) for each in asked] == [0, 0, 0, 8, 20, 0]
    assert num_cached([0] * 21) == 20
    assert num_cached({"prompt_embeds": first, "cache_salt": "x"}) == 0


def test_no_penalty_counts_the_zeros(models: Any) -> None:
    """A penalty would double or halve a logit. The second prompt is computed behind a cached prefix, by which
    the last bits may change."""
    path, hf = models("llama")
    llm = open_tiny(path, **SETTINGS | {"logprobs_mode": "processed_logits"})
    plain, penalised = (
        llm.generate(
            {"prompt_embeds": vectors(hf, PROMPTS[0])},
            SamplingParams(temperature=0, max_tokens=1, logprobs=-1, repetition_penalty=penalty),
            use_tqdm=False,
        )
        for penalty in (1.0, 2.0)
    )
    torch.testing.assert_close(logits_of(penalised[0]), logits_of(plain[0]), atol=1e-4, rtol=1e-4)
    assert logits_of(plain[0])[0, 0].abs() > 0.1, "what stands for the vectors, token 0, would be penalised"


def test_ranks_are_told_the_vectors(models: Any) -> None:
    """Two stages, of which the first reads them, and chunks."""
    path, hf = models("llama")
    expected = open_tiny(path, max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
    sizes = {"pipeline_parallel_size": 2, "cpu_threads": 1}
    llm = open_tiny(path, max_num_batched_tokens=16, **SETTINGS, **sizes)
    try:
        check_same(llm.generate(some_as_vectors(hf, PROMPTS), PARAMS, use_tqdm=False), expected)
    finally:
        llm.llm_engine.close()


def test_borrowed_models_read_vectors(tmp_path: Path) -> None:
    path, hf = make_tiny("llama", tmp_path)
    llm = open_tiny(path, model_impl="transformers", max_num_batched_tokens=16, **SETTINGS)
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    check_same(llm.generate(some_as_vectors(hf, PROMPTS), PARAMS, use_tqdm=False), expected)


def test_what_needs_tokens_is_refused(models: Any) -> None:
    from quire import BeamSearchParams

    path, hf = models("llama")
    given = {"prompt_embeds": vectors(hf, PROMPTS[0])}
    llm: LLM = open_tiny(path, **SETTINGS)
    with pytest.raises(RequestError, match="beam search needs a prompt of text or token ids"):
        llm.beam_search([given], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(RequestError, match="not compatible with prompt embeds"):
        llm.generate(given, SamplingParams(prompt_logprobs=1), use_tqdm=False)
