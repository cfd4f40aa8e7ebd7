"""The whole engine on a GPU: graphs, batches, chunks and prefix hits change nothing."""

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
    path: Path, asked: list[list[int]], *, one_by_one: bool = False, **settings: Any
) -> list[RequestOutput]:
    gc.collect()
    torch.cuda.empty_cache()
    llm = LLM(
        str(path),
        **{"skip_tokenizer_init": True, "max_model_len": 512, "num_gpu_blocks_override": 4000} | settings,
    )
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=5)
    if one_by_one:
        return [llm.generate([each], params, use_tqdm=False)[0] for each in asked]
    return llm.generate(asked, params, use_tqdm=False)


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
def test_float32_tokens_are_transformers(tiny: tuple[Path, Any], way: str) -> None:
    path, hf = tiny
    asked = prompts(24)
    found = tokens(run(path, asked, dtype="float32", **WAYS[way]))
    for prompt, said in zip(asked, found, strict=True):
        ids = list(prompt)
        for token in said[:6]:
            logits = run_hf(hf, ids)[-1]
            assert logits[token] > logits.max() - 1e-3
            ids.append(token)


@pytest.mark.parametrize(("dtype", "noise"), [("bfloat16", 0.1), ("float16", 0.0125)])
def test_tokens_that_are_no_near_ties_are_the_same_in_every_way(
    tiny: tuple[Path, Any], dtype: str, noise: float
) -> None:
    """Rounded logits differ a little with the batch, by `noise` as a rule: where the best token leads by far
    more it must be the same."""
    asked = prompts(64)
    expected = run(tiny[0], asked, dtype=dtype)
    for way, settings in WAYS.items():
        apart: list[float] = []
        for ours, theirs in zip(run(tiny[0], asked, dtype=dtype, **settings), expected, strict=True):
            apart += distances(ours, theirs, way, margin=10 * noise)
        assert len(apart) > 200, way
        assert sum(apart) / len(apart) < noise and max(apart) < 8 * noise, way


def distances(ours: RequestOutput, theirs: RequestOutput, way: str, margin: float) -> list[float]:
    """How far the logprobs of the best token lie apart, up to where a near tie went another way."""
    found, apart = (ours.outputs[0], theirs.outputs[0]), []
    assert found[0].logprobs is not None and found[1].logprobs is not None
    for at in range(LENGTH):
        mine, other = (list(each.logprobs[at].items()) for each in found)  # type: ignore[index, union-attr]
        best = sorted((value.logprob for _, value in other), reverse=True)
        if mine[0][0] != other[0][0]:
            assert best[0] - best[1] < margin, f"{way}: token {at}"
            break
        apart.append(abs(mine[0][1].logprob - other[0][1].logprob))
    return apart


def test_a_prefix_hit_says_the_same_as_a_full_prompt(tiny: tuple[Path, Any]) -> None:
    shared = prompts(1)[0] * 4
    asked = [shared[:300] + tail for tail in prompts(12)]
    asked = [each[:400] for each in asked]
    cold = tokens(run(tiny[0], asked, dtype="float32", enable_prefix_caching=False))
    assert tokens(run(tiny[0], asked, dtype="float32", one_by_one=True)) == cold


def test_draws_depend_on_seed_and_position_alone(tiny: tuple[Path, Any]) -> None:
    asked = prompts(16)
    params = [SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=i, max_tokens=8) for i in range(16)]
    llm = LLM(
        str(tiny[0]),
        skip_tokenizer_init=True,
        max_model_len=512,
        num_gpu_blocks_override=4000,
        dtype="float32",
    )
    together = tokens(llm.generate(asked, params, use_tqdm=False))
    alone = [
        tokens(llm.generate([one], [each], use_tqdm=False))[0]
        for one, each in zip(asked, params, strict=True)
    ]
    assert together == alone


def test_an_8_bit_cache_is_close(tiny: tuple[Path, Any]) -> None:
    asked = prompts(16)
    exact = run(tiny[0], asked, dtype="bfloat16")
    rough = run(tiny[0], asked, dtype="bfloat16", kv_cache_dtype="fp8")
    apart = []
    for ours, theirs in zip(rough, exact, strict=True):
        mine, other = (each.outputs[0].logprobs for each in (ours, theirs))
        assert mine is not None and other is not None
        first = theirs.outputs[0].token_ids[0]
        mine_first, other_first = mine[0], other[0]
        assert mine_first is not None and other_first is not None
        if first in mine_first:
            apart.append(abs(mine_first[first].logprob - other_first[first].logprob))
    assert len(apart) >= 12 and sum(apart) / len(apart) < 0.3
