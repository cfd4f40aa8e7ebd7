"""Our models against transformers in float32, over a paged cache with shuffled blocks and NaN in gaps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged

from quire.config.families import FAMILIES
from quire.models import MODELS

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-rope-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-upper-window": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_whole_and_in_chunks(variant: str, tmp_path: Path) -> None:
    """A wrong rope, bias, norm, head layout, window, or a chunk that loses sight of earlier chunks."""
    family, overrides = VARIANTS[variant]
    path, hf_model = make_tiny(family, tmp_path, **overrides)
    prompts = random_prompts(23, 9, 40)
    expected = [run_hf(hf_model, ids) for ids in prompts]
    whole = [[23, 9, 40]]
    chunked = [[10, 0, 17], [1, 4, 16], [12, 4, 1], [0, 1, 6]]
    for steps in (whole, chunked):
        for ours, theirs in zip(run_paged(load_tiny(path), prompts, steps), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_dynamic_rope_beyond_the_original_length_uses_the_base_of_the_engines_longest(tmp_path: Path) -> None:
    path, hf_model = make_tiny(
        "llama", tmp_path, rope_parameters=ROPES["dynamic"], max_position_embeddings=32
    )
    ids = random_prompts(64)[0]
    ours = run_paged(load_tiny(path, max_model_len=64), [ids], [[64]])[0]
    torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_a_token_at_a_time_is_the_same_as_all_at_once(tmp_path: Path) -> None:
    path, hf_model = make_tiny("llama", tmp_path)
    prompts = random_prompts(6, 11)
    steps = [[int(step < 6), 1] for step in range(11)]
    for ours, ids in zip(run_paged(load_tiny(path), prompts, steps), prompts, strict=True):
        torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=1e-4, rtol=1e-4)


def test_every_architecture_that_is_read_has_a_model() -> None:
    """A family added to the config reader but not to the model table."""
    assert set(MODELS) == set(FAMILIES)
    assert all(MODELS[name] for name in MODELS)
