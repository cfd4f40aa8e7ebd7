"""The engine says what transformers says: every logit, whichever way the tokens went through it."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import check_against, generate, open_tiny, prompts_of
from zoo import LLAMA3, ZOO, architecture_of

MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", LLAMA3),
    "mistral-window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-some-windows": (
        "qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""The models that go every way; all others go one that has something of each."""

Tiny = tuple[Path, Any]


@pytest.fixture(scope="module", params=MATRIX)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, overrides = MATRIX[request.param]
    return make_tiny(family, tmp_path_factory.mktemp(request.param), **overrides)


@pytest.mark.parametrize("architecture", sorted(set(ZOO) - {architecture_of(f) for f, _ in MATRIX.values()}))
def test_chunks_preemption_and_prefix_hits_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    path, hf_model = make_tiny(architecture, tmp_path)
    llm = open_tiny(
        path, max_num_batched_tokens=7, max_num_seqs=4, num_gpu_blocks_override=20, max_model_len=44
    )
    prompts = prompts_of(10, 17, 12, 13)
    check_against(hf_model, generate(llm, prompts, count=20))
    scheduler = llm.llm_engine.core.scheduler
    if scheduler.kv.windows == (None,):  # requests with windows are let in with most of what they will hold
        assert scheduler.num_preemptions > 0
    check_against(hf_model, generate(llm, prompts[1:2]))
    (again,) = generate(llm, prompts[1:2])
    assert again.num_cached_tokens == (16 if llm.config.cache.enable_prefix_caching else 0)
    check_against(hf_model, [again])


def test_whole_prompts(tiny: Tiny) -> None:
    path, hf_model = tiny
    check_against(hf_model, generate(open_tiny(path), prompts_of(1, 2, 3, 4, 5, 8, 17, 31)))


@pytest.mark.parametrize("chunk", [*range(1, 13), 16, 23, 37])
def test_chunks_of_every_size(tiny: Tiny, chunk: int) -> None:
    path, hf_model = tiny
    llm = open_tiny(path, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3))
    check_against(hf_model, generate(llm, prompts_of(23, 9, 37), count=3))


def test_prefix_hits(tiny: Tiny) -> None:
    path, hf_model = tiny
    llm = open_tiny(path)
    (common,) = prompts_of(19)
    prompts = [common + tail for tail in prompts_of(1, 2, 5, 9, seed=8)] + [common, common[:8]]
    check_against(hf_model, generate(llm, prompts))
    again = generate(llm, prompts)
    check_against(hf_model, again)
    assert [output.num_cached_tokens for output in again] == [16, 20, 20, 24, 16, 4]


def test_preemption(tiny: Tiny) -> None:
    path, hf_model = tiny
    llm = open_tiny(path, num_gpu_blocks_override=34, max_model_len=44)
    outputs = generate(llm, prompts_of(10, 11, 12, 13, 9), count=20)
    scheduler = llm.llm_engine.core.scheduler
    if None in scheduler.kv.windows:  # else no request grows beyond what it was let in with
        assert scheduler.num_preemptions > 0
    check_against(hf_model, outputs)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 13, 16, 21, 27, 32, 33])
def test_mixed_batches(tiny: Tiny, batch: int) -> None:
    path, hf_model = tiny
    llm = open_tiny(path, max_num_batched_tokens=64, max_num_seqs=33)
    lengths = [1 + (7 * i) % 41 for i in range(batch)]
    check_against(hf_model, generate(llm, prompts_of(*lengths), count=4))


def test_64_long_requests_with_room_for_barely_two(tmp_path: Path) -> None:
    """No livelock: all finish, with the tokens that they have with ample room."""
    path, _ = make_tiny("llama", tmp_path)
    prompts = prompts_of(*[20 + i % 13 for i in range(64)])
    ample = generate(open_tiny(path, max_num_seqs=64), prompts, count=40)
    llm = open_tiny(path, max_num_seqs=64, num_gpu_blocks_override=38, max_model_len=76)
    tight = generate(llm, prompts, count=40)
    assert llm.llm_engine.core.scheduler.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in ample]
