"""Tests of prompt embeddings in the whole engine: outputs match those of the token ids."""

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
"""Models with plain embeddings, scaled embeddings and windows, learned positions, and SSM states."""
SETTINGS: dict[str, Any] = {"enable_prompt_embeds": True, "max_model_len": 64, "max_num_seqs": 6}
PROMPTS = prompts_of(21, 1, 17, 30, 5, 1)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: make_tiny(family, tmp_path_factory.mktemp("embeds"), **FAMILIES[family]))


def vectors(hf: Any, ids: list[int]) -> Tensor:
    """Return the input embeddings of the first layer, which are scaled for Gemma."""
    actual: Tensor = hf.get_input_embeddings()(torch.tensor(ids)).detach()
    return actual


def some_as_vectors(hf: Any, prompts: list[list[int]]) -> list[Any]:
    """Replace every second prompt with embeddings."""
    return [ids if place % 2 else {"prompt_embeds": vectors(hf, ids)} for place, ids in enumerate(prompts)]


def check_same(actual: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, reference in zip(actual, expected, strict=True):
        assert output.outputs[0].token_ids == reference.outputs[0].token_ids
        assert torch.allclose(logits_of(output), logits_of(reference), atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_embeds_match_token_ids(family: str, models: Any) -> None:
    """Check whole prompts, chunks beside decodes, and prompts of one token, which look like decodes."""
    path, hf = models(family)
    expected = open_tiny(path, max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
    llm = open_tiny(path, max_num_batched_tokens=16, **SETTINGS)
    for requests in (some_as_vectors(hf, PROMPTS), [{"prompt_embeds": vectors(hf, ids)} for ids in PROMPTS]):
        check_same(llm.generate(requests, PARAMS, use_tqdm=False), expected)
    for place in range(2):
        requests = {"prompt_embeds": sent(vectors(hf, PROMPTS[place]))}
        check_same(llm.generate(requests, PARAMS, use_tqdm=False), [expected[place]])


@pytest.mark.parametrize("sharing", [True, False], ids=["prefixes", "no prefixes"])
def test_preempted_request_keeps_its_prompt_embeds(sharing: bool, models: Any) -> None:
    path, hf = models("llama")
    expected = open_tiny(path, max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
    llm = open_tiny(path, max_num_batched_tokens=16, enable_prefix_caching=sharing, **SETTINGS)
    actual = generate_preempted(llm, some_as_vectors(hf, PROMPTS), 8, at=(1, 3, 4, 6, 9))
    check_same(actual, expected)
    assert llm.llm_engine.core.scheduler.num_preemptions == 5


def test_prefix_cache_keys_include_prompt_embeds(models: Any) -> None:
    """Check that the zeros in place of token ids are not taken for a prefix."""
    path, hf = models("llama")
    llm = open_tiny(path, **SETTINGS)
    first, other = vectors(hf, PROMPTS[0]), vectors(hf, prompts_of(21, seed=9)[0])
    mixed = torch.cat([first[:8], other[8:]])

    def num_cached(prompt: Any) -> int | None:
        return llm.generate(prompt, PARAMS, use_tqdm=False)[0].num_cached_tokens

    requests = [
        [0] * 21,
        *({"prompt_embeds": request} for request in (first, other, mixed, first, first.half())),
    ]
    assert [num_cached(request) for request in requests] == [0, 0, 0, 8, 20, 0]
    assert num_cached([0] * 21) == 20
    assert num_cached({"prompt_embeds": first, "cache_salt": "x"}) == 0


def test_penalties_ignore_placeholder_zeros(models: Any) -> None:
    """Check the first logit, which a penalty would scale.

    The second prompt hits a cached prefix, which may change the last bits.
    """
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
    assert logits_of(plain[0])[0, 0].abs() > 0.1, "the placeholder token 0 would be penalised"


def test_prompt_embeds_reach_all_ranks(models: Any) -> None:
    """Check two pipeline stages, of which the first reads the embeddings, and chunks."""
    path, hf = models("llama")
    expected = open_tiny(path, max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
    sizes = {"pipeline_parallel_size": 2, "cpu_threads": 1}
    llm = open_tiny(path, max_num_batched_tokens=16, **SETTINGS, **sizes)
    try:
        check_same(llm.generate(some_as_vectors(hf, PROMPTS), PARAMS, use_tqdm=False), expected)
    finally:
        llm.llm_engine.close()


def test_transformers_backend_reads_prompt_embeds(tmp_path: Path) -> None:
    path, hf = make_tiny("llama", tmp_path)
    llm = open_tiny(path, model_impl="transformers", max_num_batched_tokens=16, **SETTINGS)
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    check_same(llm.generate(some_as_vectors(hf, PROMPTS), PARAMS, use_tqdm=False), expected)


def test_features_that_need_token_ids_are_rejected(models: Any) -> None:
    from quire import BeamSearchParams

    path, hf = models("llama")
    prompt = {"prompt_embeds": vectors(hf, PROMPTS[0])}
    llm: LLM = open_tiny(path, **SETTINGS)
    with pytest.raises(RequestError, match="beam search needs a prompt of text or token ids"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(RequestError, match="not compatible with prompt embeds"):
        llm.generate(prompt, SamplingParams(prompt_logprobs=1), use_tqdm=False)
