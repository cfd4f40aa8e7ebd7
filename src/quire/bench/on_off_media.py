"""A vision-language model with random weights on two tensor parallel ranks, and images for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models

from quire.entrypoints.llm import LLM

_PATCH, _MERGE = 14, 2
_MARKS = {"<unk>": 0, "<image>": 1001, "<video>": 1002, "<begin>": 1003, "<end>": 1004}
_TEXT = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
_TOWER = {
    "depth": 12,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_heads": 8,
    "patch_size": _PATCH,
    "out_hidden_size": 256,
    "window_size": 112,
    "fullatt_block_indexes": [5, 11],
    "tokens_per_second": 2,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
}
_CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": _TEXT,
    "vision_config": _TOWER,
    "image_token_id": _MARKS["<image>"],
    "video_token_id": _MARKS["<video>"],
    "vision_start_token_id": _MARKS["<begin>"],
    "vision_end_token_id": _MARKS["<end>"],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_PROCESSOR = {"patch_size": _PATCH, "temporal_patch_size": 2, "merge_size": _MERGE}


def open_seeing(folder: Path, change: Mapping[str, Any], edge: int, count: int) -> LLM:
    """Open a model shaped like Qwen2.5-VL, with most weights in the vision encoder and without caches for
    images."""
    size = {"shortest_edge": 56 * 56, "longest_edge": edge * edge}
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR | {"size": size}))
    tokenizer = Tokenizer(models.WordLevel(_MARKS, "<unk>"))
    tokenizer.add_special_tokens(list(_MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = (edge // _PATCH // _MERGE) ** 2 + 8
    return LLM(
        str(folder),
        load_format="dummy",
        tensor_parallel_size=2,
        max_model_len=2 * tokens,
        max_num_seqs=count,
        max_num_batched_tokens=max(count * tokens, 256),
        kv_cache_memory_bytes=1 << 26,
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,
        **change,
    )


def images(count: int, edge: int, turn: int) -> list[dict[str, Any]]:
    """Return `count` prompts of one random image each; the images depend on `turn`."""
    draw = np.random.default_rng(turn + 1)
    pixels = [draw.integers(0, 256, (edge, edge, 3), np.uint8) for _ in range(count)]
    ids = [_MARKS["<begin>"], _MARKS["<image>"], _MARKS["<end>"]]
    return [
        {"prompt_token_ids": ids, "multi_modal_data": {"image": [Image.fromarray(image)]}} for image in pixels
    ]
