"""Tiny model of the second version of DeepSeek-OCR, stored as published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file
from seeing_deepseek import DeepseekOCRStand
from tiny_seeing import STRONG, make_tokenizer

_SIDE, _TILE = 128, 96
"""Image sides with 256 and 144 patches after SAM, as many as transformers has queries."""
_SAM = {"layers": 2, "width": 16, "heads": 2, "global_attn_indexes": [], "downsample_channels": [12, 24]}
_SAM |= {"patch_size": 2, "window_size": 9, "output_channels": 8}
_ENCODER = {"dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 40, "rope_theta": 1e4}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
}


class DeepseekOCR2Stand(DeepseekOCRStand):
    """Processor of transformers, whose tokenizer is not that of the tests."""

    settings = {"size": {"height": _SIDE, "width": _SIDE}, "tile_size": _TILE, "max_patches": 3}
    tile = _TILE

    def rewrite(self, path: Path, model: Any) -> None:
        """Write config.json as published, and check the names of tensors."""
        file = path / "config.json"
        text = json.loads(file.read_text())["text_config"]
        kept = {key: text[key] for key in (*STRONG, *_EXPERTS) if text.get(key) is not None}
        config = {
            "architectures": ["DeepseekOCR2ForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "vision_config": {"image_size": _SIDE, "width": {"sam_vit_b": _SAM, "qwen2-0-5b": _ENCODER}},
            "language_config": kept | {"use_mla": False, "first_k_dense_replace": 1},
        }
        file.write_text(json.dumps(config))
        names = load_file(path / "model.safetensors")
        assert "model.qwen2_model.model.model.layers.0.self_attn.q_proj.weight" in names
        assert (
            "model.sam_model.blocks.0.attn.qkv.weight" in names
            and "model.layers.0.mlp.up_proj.weight" in names
        )

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        made = self.images(images, return_tensors="pt")
        inputs: dict[str, Any] = {name: made[name] for name in made if name != "num_local_patches"}
        counts = [columns * rows for columns, rows in map(self.grid_of, images)]
        inputs["num_local_patches"] = counts
        out, *rest = text.split("<image>")
        for count, part in zip(counts, rest, strict=True):
            out += "<image>" * (144 * count + 256 + 1) + part
        return dict(self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)) | inputs


def _deepseek_ocr2() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(["<image>"])
    sam = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": 2,
        "window_size": 9,
        "global_attn_indexes": [],
        "mlp_dim": 64,
        "output_channels": 8,
        "downsample_channels": [12, 24],
        "initializer_range": 0.2,
    }
    encoder = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    text = STRONG | _EXPERTS | {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]}
    config = hf.DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return "DeepseekOcr2ForConditionalGeneration", config, DeepseekOCR2Stand(tokenizer), "<image>"


DEEPSEEK2: dict[str, Callable[[], tuple[str, Any, Any, str]]] = {"deepseek_ocr2": _deepseek_ocr2}
