"""Tests of `batch_invariant` on a CPU, where only latent attention and its sparse indexer depend on it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny
from tiny import logits_of, open_tiny, prompts_of

from quire import SamplingParams
from quire.attention import cpu_mla
from quire.kernels import batch_invariant
from quire.kernels.cpu import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
LENGTH = 75


@pytest.mark.parametrize(
    ("family", "is_fixed"), [("deepseek_v3", True), ("deepseek_v3", False), ("glm_moe_dsa", True)]
)
def test_chunks_of_a_prompt_do_not_change_the_bits(
    family: str, is_fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a prompt in one chunk, which would be expanded without the setting, and in chunks that depend on
    other requests."""
    monkeypatch.setattr(batch_invariant, "_switch", {"on": False})
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 24)
    path, _ = make_tiny(family, tmp_path)
    prompts = prompts_of(LENGTH, 30, 9, 61)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1)
    results = []
    for num_tokens, beside in ((256, 0), (20, 0), (33, 3)):
        more: dict[str, Any] = {"enable_prefix_caching": False, "batch_invariant": is_fixed}
        llm = open_tiny(path, max_num_batched_tokens=num_tokens, max_num_seqs=8, **more)
        outputs = llm.generate(prompts[: beside + 1][::-1], params, use_tqdm=False)
        results.append(logits_of(outputs[-1]))
        llm.llm_engine.close()
    is_equal = all(torch.equal(result, results[0]) for result in results)
    assert is_equal is is_fixed
