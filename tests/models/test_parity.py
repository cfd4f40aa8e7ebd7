"""Our models against transformers in float32, over a paged cache with shuffled blocks and NaN in gaps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import ENCODERS
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged
from zoo import ZOO, rope

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.transformers_backend import BORROWED
from quire.models import MODELS

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{architecture}-{name}": (architecture, changes)
    for architecture, specimen in ZOO.items()
    for name, changes in ({"plain": {}} | specimen.variants).items()
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_whole_and_in_chunks(variant: str, tmp_path: Path) -> None:
    """A wrong rope, bias, norm, head layout, window, or a chunk that loses sight of earlier chunks; a config
    reader that takes a size from somewhere else than its key, so that overrides do not change it."""
    architecture, changes = VARIANTS[variant]
    path, hf_model = make_tiny(architecture, tmp_path, **changes)
    if not changes:
        facts = read_checkpoint(path, {"vocab_size": 77, "tie_word_embeddings": True}).facts
        assert (facts.vocab, facts.tied) == (77, True)
    prompts = random_prompts(23, 9, 40)
    expected = [run_hf(hf_model, ids) for ids in prompts]
    whole = [[23, 9, 40]]
    chunked = [[10, 0, 17], [1, 4, 16], [12, 4, 1], [0, 1, 6]]
    for steps in (whole, chunked):
        for ours, theirs in zip(run_paged(load_tiny(path), prompts, steps), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-3)


def test_dynamic_rope_beyond_the_original_length_uses_the_base_of_the_engines_longest(tmp_path: Path) -> None:
    path, hf_model = make_tiny("llama", tmp_path, **rope("dynamic", factor=2.0), max_position_embeddings=32)
    ids = random_prompts(64)[0]
    ours = run_paged(load_tiny(path, max_model_len=64), [ids], [[64]])[0]
    torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_a_token_at_a_time_is_the_same_as_all_at_once(tmp_path: Path) -> None:
    path, hf_model = make_tiny("llama", tmp_path)
    prompts = random_prompts(6, 11)
    steps = [[int(step < 6), 1] for step in range(11)]
    for ours, ids in zip(run_paged(load_tiny(path), prompts, steps), prompts, strict=True):
        torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


HEARS = "WhisperForConditionalGeneration"
"""What says nothing without a sound: `tests/multimodal/test_whisper.py`."""


def test_every_architecture_that_is_read_has_a_model_and_is_in_the_zoo() -> None:
    """A family added to the config reader but not to the model table, or without a parity test."""
    encoders = {name.partition(",")[0] for name in ENCODERS}
    assert {*FAMILIES, BORROWED} == set(MODELS) == {*ZOO, *encoders, BORROWED, HEARS}
    assert all(MODELS[name] for name in MODELS)
