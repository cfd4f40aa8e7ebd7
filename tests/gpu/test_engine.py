"""Tests of the whole engine on a GPU: graphs, batches, chunks and prefix hits do not change outputs."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny, run_hf

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
LENGTH = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make_tiny("qwen3", tmp_path_factory.mktemp("gpu"), **SIZE)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 300, (count,), generator=generator).tolist()
    return [torch.randint(5, 1000, (n,), generator=generator).tolist() for n in lengths]


def run(
    path: Path, requests: list[list[int]], *, one_by_one: bool = False, **settings: Any
) -> list[RequestOutput]:
    gc.collect()
    torch.cuda.empty_cache()
    llm = LLM(
        str(path),
        **{"skip_tokenizer_init": True, "max_model_len": 512, "num_gpu_blocks_override": 4000} | settings,
    )
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=5)
    if one_by_one:
        return [llm.generate([request], params, use_tqdm=False)[0] for request in requests]
    return llm.generate(requests, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "in turn": {"async_scheduling": False},
    "batch 1": {"one_by_one": True},
    "chunks": {"max_num_batched_tokens": 96, "max_num_seqs": 32},
    "no prefix": {"enable_prefix_caching": False},
    "sdpa": {"attention_backend": "TORCH_SDPA", "enforce_eager": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_float32_tokens_match_transformers(tiny: tuple[Path, Any], way: str) -> None:
    path, hf = tiny
    requests = prompts(24)
    actual = tokens(run(path, requests, dtype="float32", **WAYS[way]))
    for prompt, output in zip(requests, actual, strict=True):
        ids = list(prompt)
        for token in output[:6]:
            logits = run_hf(hf, ids)[-1]
            assert logits[token] > logits.max() - 1e-3
            ids.append(token)


@pytest.mark.parametrize(("dtype", "noise"), [("bfloat16", 0.1), ("float16", 0.0125)])
def test_tokens_without_near_ties_are_equal_in_every_mode(
    tiny: tuple[Path, Any], dtype: str, noise: float
) -> None:
    """Check tokens whose lead is far above `noise`, the usual change of a logit with the batch."""
    requests = prompts(64)
    expected = run(tiny[0], requests, dtype=dtype)
    for way, settings in WAYS.items():
        apart: list[float] = []
        for actual, reference in zip(run(tiny[0], requests, dtype=dtype, **settings), expected, strict=True):
            apart += distances(actual, reference, way, margin=10 * noise)
        assert len(apart) > 200, way
        assert sum(apart) / len(apart) < noise and max(apart) < 8 * noise, way


def distances(actual: RequestOutput, expected: RequestOutput, way: str, margin: float) -> list[float]:
    """Return the differences of the top logprobs, up to the first near tie with another choice."""
    result, apart = (actual.outputs[0], expected.outputs[0]), []
    assert result[0].logprobs is not None and result[1].logprobs is not None
    for at in range(LENGTH):
        one, other = (list(item.logprobs[at].items()) for item in result)  # type: ignore[index, union-attr]
        best = sorted((value.logprob for _, value in other), reverse=True)
        if one[0][0] != other[0][0]:
            assert best[0] - best[1] < margin, f"{way}: token {at}"
            break
        apart.append(abs(one[0][1].logprob - other[0][1].logprob))
    return apart


def test_prefix_hit_matches_a_full_prompt(tiny: tuple[Path, Any]) -> None:
    shared = prompts(1)[0] * 4
    requests = [shared[:300] + tail for tail in prompts(12)]
    requests = [request[:400] for request in requests]
    cold = tokens(run(tiny[0], requests, dtype="float32", enable_prefix_caching=False))
    assert tokens(run(tiny[0], requests, dtype="float32", one_by_one=True)) == cold


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba"])
def test_hit_of_a_model_with_states_matches_a_full_prompt(family: str, tmp_path: Path) -> None:
    """Check copies of states between steps in flight, with captured decodes and without."""
    path, _ = make_tiny(family, tmp_path, max_position_embeddings=512)
    shared, *tails = ([5 + token % 120 for token in prompt] for prompt in prompts(12))
    requests = [(shared * 300)[:290] + tail[:90] for tail in tails]
    cold = run(path, requests, dtype="float32", enable_prefix_caching=False)
    for way in ("graphs", "eager", "in turn"):
        hits = run(path, requests, dtype="float32", one_by_one=True, mamba_block_size=16, **WAYS[way])
        assert all((output.num_cached_tokens or 0) >= 288 for output in hits[2:])
        for actual, expected in zip(hits, cold, strict=True):
            assert max(distances(actual, expected, way, margin=1e-2)) < 1e-3


def test_samples_depend_only_on_seed_and_position(tiny: tuple[Path, Any]) -> None:
    requests = prompts(16)
    params = [SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=i, max_tokens=8) for i in range(16)]
    llm = LLM(
        str(tiny[0]),
        skip_tokenizer_init=True,
        max_model_len=512,
        num_gpu_blocks_override=4000,
        dtype="float32",
    )
    together = tokens(llm.generate(requests, params, use_tqdm=False))
    alone = [
        tokens(llm.generate([one], [param], use_tqdm=False))[0]
        for one, param in zip(requests, params, strict=True)
    ]
    assert together == alone


def test_8_bit_cache_is_close(tiny: tuple[Path, Any]) -> None:
    requests = prompts(16)
    exact = run(tiny[0], requests, dtype="bfloat16")
    rough = run(tiny[0], requests, dtype="bfloat16", kv_cache_dtype="fp8")
    apart = []
    for actual, expected in zip(rough, exact, strict=True):
        one, other = (item.outputs[0].logprobs for item in (actual, expected))
        assert one is not None and other is not None
        first = expected.outputs[0].token_ids[0]
        mine_first, other_first = one[0], other[0]
        assert mine_first is not None and other_first is not None
        if first in mine_first:
            apart.append(abs(mine_first[first].logprob - other_first[first].logprob))
    assert len(apart) >= 12 and sum(apart) / len(apart) < 0.3
