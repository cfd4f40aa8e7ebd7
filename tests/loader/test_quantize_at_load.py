"""Tests of bfloat16 checkpoints on a CPU that computes in float32: stored in bfloat16, computed in
float32.
"""

import json
from pathlib import Path

import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_paged

from quire.kernels.cpu import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3_moe", False), ("gpt_oss", False)]
)
def test_weights_stay_bfloat16_and_logits_match_float32(family: str, tied: bool, tmp_path: Path) -> None:
    path, hf = make_tiny(family, tmp_path, tie_word_embeddings=tied)
    hf.bfloat16().save_pretrained(path)
    narrow = load_tiny(path)
    matrices = [p for name, p in narrow.named_parameters() if p.dim() > 1 and not name.endswith("bias")]
    assert matrices and all(matrix.dtype == torch.bfloat16 for matrix in matrices)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}))
    wide = load_tiny(path)
    assert all(p.dtype == torch.float32 for p in wide.parameters())
    prompts = random_prompts(9, 5)
    steps = [[8, 5], [1, 0]]
    for actual, expected in zip(
        run_paged(narrow, prompts, steps), run_paged(wide, prompts, steps), strict=True
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
