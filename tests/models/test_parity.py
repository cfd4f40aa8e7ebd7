"""Tests of our models against transformers in float32, over a paged cache with shuffled blocks and
NaN gaps.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import ENCODERS
from oracle import fill_with_nan, load_tiny, make_tiny, random_prompts, run_hf, run_hf_batch, run_paged
from zoo import ZOO, rope

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.transformers_config import BORROWED, OWN_CACHE
from quire.models import MODELS

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{architecture}-{name}": (architecture, changes)
    for architecture, specimen in ZOO.items()
    for name, changes in ({"plain": {}} | specimen.variants).items()
}

IN_ENGINE = {f"{architecture}-plain" for architecture, specimen in ZOO.items() if not specimen.alike}
"""Variants that `tests/engine/test_parity.py` compares with transformers, too: slow here."""


@pytest.mark.parametrize("architecture", ZOO)
def test_sizes_are_read_from_their_keys(architecture: str, tmp_path: Path) -> None:
    """Check that overrides apply."""
    path, _ = make_tiny(architecture, tmp_path)
    facts = read_checkpoint(path, {"vocab_size": 77, "tie_word_embeddings": True}).facts
    assert (facts.vocab, facts.tied) == (77, True)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_ENGINE else ()) for name in VARIANTS],
)
def test_logits_match_transformers_whole_and_in_chunks(variant: str, tmp_path: Path) -> None:
    """Check RoPE, biases, norms, head layout, windows and attention to earlier chunks."""
    architecture, changes = VARIANTS[variant]
    path, hf_model = make_tiny(architecture, tmp_path, **changes)
    prompts = random_prompts(23, 9, 40)
    expected = run_hf_batch(hf_model, prompts)
    model = load_tiny(path)
    full = [[23, 9, 40]]
    chunked = [[10, 0, 17], [1, 4, 16], [12, 4, 1], [0, 1, 6]]
    for steps in (full, chunked):
        fill_with_nan(model)
        for actual, reference in zip(run_paged(model, prompts, steps), expected, strict=True):
            torch.testing.assert_close(actual, reference, atol=3e-4, rtol=1e-3)


def test_dynamic_rope_uses_the_base_of_max_model_len(tmp_path: Path) -> None:
    path, hf_model = make_tiny("llama", tmp_path, **rope("dynamic", factor=2.0), max_position_embeddings=32)
    ids = random_prompts(64)[0]
    actual = run_paged(load_tiny(path, max_model_len=64), [ids], [[64]])[0]
    torch.testing.assert_close(actual, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_single_tokens_match_whole_prompts(tmp_path: Path) -> None:
    path, hf_model = make_tiny("llama", tmp_path)
    prompts = random_prompts(6, 11)
    steps = [[int(step < 6), 1] for step in range(11)]
    expected = run_hf_batch(hf_model, prompts)
    for actual, reference in zip(run_paged(load_tiny(path), prompts, steps), expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)


WHISPER = "WhisperForConditionalGeneration"
"""Models that need audio: `tests/multimodal/test_whisper.py`."""
DUAL_ENCODERS = ("CLIPModel", "SiglipModel")
"""Models of texts and images: `tests/multimodal/test_dual_encoders.py`."""


def test_every_supported_architecture_has_a_model_and_a_zoo_entry() -> None:
    """Check for a family in the config reader without a model or a parity test."""
    encoders = {name.partition(",")[0] for name in ENCODERS}
    tested = {*ZOO, *encoders, BORROWED, OWN_CACHE, WHISPER, *DUAL_ENCODERS}
    assert {*FAMILIES, BORROWED, OWN_CACHE} == set(MODELS) == tested
    assert all(MODELS[name] for name in MODELS)
