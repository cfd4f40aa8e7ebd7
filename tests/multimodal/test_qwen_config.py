"""Tests of config.json of Qwen's and GLM's vision models, in the older form and in the current one."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_qwen import FAMILIES, made

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.errors import ConfigError

FIRST: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "eos_token_id": 151645,
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "mrope"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    "vocab_size": 151936,
}
"""Config of Qwen2.5-VL-3B."""


def _read(config: dict[str, Any], path: Path) -> Any:
    (path / "config.json").write_text(json.dumps(config))
    return read_checkpoint(path)


def test_decoder_and_vision_config_are_read(tmp_path: Path) -> None:
    checkpoint = _read(FIRST, tmp_path)
    facts, media = checkpoint.facts, checkpoint.facts.media
    assert (facts.architecture, facts.hidden, facts.tied, facts.qkv_bias) == (
        "Qwen2ForCausalLM",
        2048,
        True,
        True,
    )
    assert facts.layers[0].rope.kind == "default" and checkpoint.dtype == "bfloat16"
    assert checkpoint.eos_ids == (151645,)
    assert (media.family, media.modalities, media.levels) == ("qwen2_5_vl", ("image", "video"), 0)
    tower: GridFacts = media.tower
    assert (tower.hidden, tower.size_out, tower.patch, tower.window) == (1280, 2048, 14, 112)
    assert (tower.far, tower.pace, tower.image_id, tower.video_id) == ((7, 15, 23, 31), 2.0, 151655, 151656)
    older = FIRST | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert _read(older, tmp_path).facts == facts


def test_invalid_vision_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision_config"):
        _read(FIRST | {"vision_config": None}, tmp_path)
    with pytest.raises(ConfigError, match="7 heads of 1280"):
        _read(FIRST | {"vision_config": FIRST["vision_config"] | {"num_heads": 7}}, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_saved_by_transformers_are_read(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, model = made(family, tmp_path_factory.getbasetemp())
    facts = read_checkpoint(path).facts
    text, media = model.config.text_config, facts.media
    assert media is not None
    assert (facts.hidden, len(facts.layers)) == (text.hidden_size, text.num_hidden_layers)
    aux_hidden_states = getattr(model.config.vision_config, "deepstack_visual_indexes", ())
    assert (media.levels, media.tower.aux_layers) == (len(aux_hidden_states), tuple(aux_hidden_states))
    vision = model.config.vision_config
    assert media.tower.depth == (vision.num_hidden_layers if family == "Lfm3Vl" else vision.depth)
