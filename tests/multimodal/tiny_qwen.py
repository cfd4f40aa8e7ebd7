"""Tiny vision models of Qwen and GLM with random weights, as saved by transformers."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN3 = {"head_dim": 16, "rope_parameters": ROPE | {"mrope_interleaved": True}}
_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 16,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}
_QWEN3_VISION = VISION | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": (
        {"rope_parameters": ROPE},
        {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
    ),
    "Qwen2_5_VL": (
        {"rope_parameters": ROPE},
        VISION | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "Exaone4_5_": (
        {"model_type": "exaone4", "head_dim": 16, "sliding_window": 8, "rope_parameters": PLAIN},
        VISION | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 1},
    ),
    "HyperCLOVAXVisionV2": (
        {"model_type": "hyperclovax", "head_dim": 16, "rope_parameters": PLAIN, "logits_scaling": 0.5}
        | {"embedding_multiplier": 2.0, "hidden_size": 48, "attention_multiplier": 0.2},
        VISION | {"model_type": "qwen2_5_vl_vision", "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Lfm3Vl": (
        {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "conv"], "head_dim": 16}
        | {"rope_parameters": {"full_attention": PLAIN}},
        {key: VISION[key] for key in ("hidden_size", "intermediate_size", "patch_size")}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
        | {"layer_types": ["conv", "full_attention", "conv"]},
    ),
    "Qwen3VL": (_QWEN3, _QWEN3_VISION),
    "Qwen3VLMoe": (_QWEN3 | _EXPERTS, _QWEN3_VISION),
    "Qwen3_5": (_DELTA, VISION | {"num_position_embeddings": 25}),
    "Glm4v": (
        {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        VISION | {"image_size": 20, "hidden_act": "silu"},
    ),
    "Glm46V": (
        {
            "model_type": "glm4v_text",
            "rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        VISION | {"model_type": "glm4v_vision", "image_size": 20},
    ),
    "GlmOcr": (
        {"head_dim": 32, "rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
        VISION | {"attention_bias": True, "rms_norm_eps": 1e-4},
    ),
    "Glm4vMoe": (
        {
            "rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        VISION | {"image_size": 20, "attention_bias": True},
    ),
}
"""Text and vision settings that differ from the defaults, by family."""
MARKS = ("<image>", "<video>", "<begin>", "<end>", "<video begin>", "<video end>")
IMAGE, VIDEO, BEGIN, END, VIDEO_BEGIN, VIDEO_END = range(259, 265)
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_GLM_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
    "video_start_token_id": VIDEO_BEGIN,
    "video_end_token_id": VIDEO_END,
}
PROCESSOR = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
PIXELS = {"shortest_edge": 256, "longest_edge": 4096}


@functools.cache
def made(family: str, directory: Path, heads: int = 2) -> tuple[Path, Any]:
    """Make a model once in `directory` (such as pytest's base temporary folder); return its path and
    transformers' model."""
    import transformers

    path = directory / f"tiny_{family}_{heads}"

    text, vision = FAMILIES[family]
    if heads != 2:
        text = text | {"hidden_size": 16 * heads, "num_attention_heads": heads}
        vision = vision | {"hidden_size": 16 * heads, "num_heads": heads, "out_hidden_size": 16 * heads}
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    ids = _GLM_IDS if family.startswith("Glm") else _IDS
    config = kind.config_class(
        text_config=_TEXT | text, vision_config=vision, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            is_one = "norm" in name or "ln_q" in name
            tensor.copy_(torch.randn_like(tensor) * (0.2 if tensor.ndim == 1 else 0.15) + is_one)
    model.save_pretrained(path)
    size = PIXELS if not family.startswith("Glm") else {"shortest_edge": 512, "longest_edge": 8192}
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"size": size}))
    video = {"size": {"shortest_edge": 256, "longest_edge": 16384}}
    (path / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR | video))
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path, model


def tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte and the markers."""
    special = ("<s>", "</s>", "<pad>")
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKS]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (*special, *MARKS)])
    return backend
