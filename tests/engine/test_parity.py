"""The engine says what transformers says: every logit, whichever way the tokens went through it."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import check_against, generate, generate_preempted, open_tiny, prompts_of
from zoo import LLAMA3, ZOO

from quire.config.layout import cache_specs, has_states
from quire.logs import warn_once

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    architecture: (architecture, {}) for architecture, specimen in ZOO.items() if not specimen.alike
} | {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", LLAMA3),
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

Tiny = tuple[Path, Any]


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, overrides = VARIANTS[request.param]
    return make_tiny(family, tmp_path_factory.mktemp(request.param), **overrides)


def check_chunks(path: Path, hf_model: Any, sizes: tuple[int, ...]) -> None:
    """Compare all logits with prompts cut into chunks of each of these sizes."""
    llm = open_tiny(path, max_num_batched_tokens=39, max_num_seqs=3, enable_prefix_caching=False)
    for size in sizes:
        llm.llm_engine.core.scheduler.limits.longest_chunk = size
        check_against(hf_model, generate(llm, prompts_of(23, 9, 37), count=2))


def test_chunks(tiny: Tiny) -> None:
    """A chunk that does not see the earlier ones: single tokens, parts of a block, whole and odd blocks."""
    check_chunks(*tiny, (1, 3, 4, 13))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba"])
def test_chunks_of_every_size(family: str, tmp_path: Path) -> None:
    """For each kind of cache: full attention, windows, MLA, gated delta states, Mamba states."""
    path, hf_model = make_tiny(family, tmp_path)
    check_chunks(path, hf_model, (*range(1, 13), 16, 23, 37))


def test_whole_prompts_and_prefix_hits(tiny: Tiny) -> None:
    """A wrong logit after a whole prompt, or after one whose beginning is cached."""
    path, hf_model = tiny
    llm = open_tiny(path)
    check_against(hf_model, generate(llm, prompts_of(1, 3, 4, 5, 8, 17, 31, seed=5)))
    (common,) = prompts_of(19)
    prompts = [common + tail for tail in prompts_of(1, 2, 5, 9, seed=8)] + [common, common[:8]]
    check_against(hf_model, generate(llm, prompts))
    again = generate(llm, prompts)
    check_against(hf_model, again)
    states = has_states(cache_specs(llm.config.checkpoint.facts))
    assert llm.config.cache.enable_prefix_caching is not states
    expected = [0] * 6 if states else [16, 20, 20, 24, 16, 4]
    assert [output.num_cached_tokens for output in again] == expected


def test_a_model_with_states_says_that_it_shares_no_prefixes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = make_tiny("qwen3_next", tmp_path)
    warn_once.cache_clear()
    open_tiny(path)
    open_tiny(path, enable_prefix_caching=False)
    assert sum("Prefix caching is off" in record.getMessage() for record in caplog.records) == 1


def test_preemption(tiny: Tiny) -> None:
    """For want of blocks; and of any model in the middle of a prompt and of an answer, since one with windows
    alone is let in with all that it will hold."""
    path, hf_model = tiny
    llm = open_tiny(
        path, max_num_batched_tokens=7, max_num_seqs=5, num_gpu_blocks_override=24, max_model_len=44
    )
    scheduler, prompts = llm.llm_engine.core.scheduler, prompts_of(10, 17, 12, 13, 9)
    check_against(hf_model, generate(llm, prompts, count=12))
    if scheduler.kv.windows == (None,):
        assert scheduler.num_preemptions > 0
    before = scheduler.num_preemptions
    check_against(hf_model, generate_preempted(llm, prompts, count=12, at=(1, 9, 14)))
    assert scheduler.num_preemptions >= before + 3


def test_mixed_batches(tiny: Tiny) -> None:
    path, hf_model = tiny
    llm = open_tiny(path, max_num_batched_tokens=64, max_num_seqs=17, enable_prefix_caching=False)
    prompts = prompts_of(*[1 + (7 * i) % 41 for i in range(17)])
    for batch in (2, 17):
        check_against(hf_model, generate(llm, prompts[:batch], count=4))


def test_64_long_requests_with_room_for_barely_two(tmp_path: Path) -> None:
    """No livelock: all finish, with the tokens that they have with ample room."""
    path, _ = make_tiny("llama", tmp_path)
    prompts = prompts_of(*[20 + i % 13 for i in range(64)])
    ample = generate(open_tiny(path, max_num_seqs=64), prompts, count=40)
    llm = open_tiny(path, max_num_seqs=64, num_gpu_blocks_override=38, max_model_len=76)
    tight = generate(llm, prompts, count=40)
    assert llm.llm_engine.core.scheduler.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in ample]
