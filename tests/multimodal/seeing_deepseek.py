"""Tiny model of DeepSeek-OCR. Transformers has its encoders and decoder in Unlimited-OCR, whose window of
generated tokens these tests do not reach."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_seeing import STRONG, Stand, make_tokenizer

_SIDE, _TILE = 64, 40
_SAM = {"layers": 3, "width": 32, "heads": 2, "global_attn_indexes": [1], "downsample_channels": [12, 24]}
_SAM |= {"patch_size": 4, "window_size": 5, "output_channels": 8}
_CLIP = {"layers": 2, "width": 24, "heads": 2, "image_size": 12, "patch_size": 3}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_EXPERTS |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1}


class DeepseekOCRStand(Stand):
    """The image processor of transformers for DeepSeek-OCR 2, which cuts tiles in the same way."""

    settings = {"size": {"height": _SIDE, "width": _SIDE}, "tile_size": _TILE, "max_patches": 5}
    tile = _TILE

    def __init__(self, tokenizer: Any) -> None:
        import transformers as hf

        super().__init__(tokenizer)
        modeling = hf.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2
        self.images = modeling.DeepseekOcr2ImageProcessorPil(**self.settings)
        self.grid = modeling.get_optimal_tiled_canvas

    def rewrite(self, path: Path, model: Any) -> None:
        """Write config.json and the names of tensors as published."""
        file = path / "config.json"
        text = json.loads(file.read_text())["text_config"]
        kept = {key: text[key] for key in (*STRONG, *_EXPERTS) if text.get(key) is not None}
        width = {"sam_vit_b": _SAM, "clip-l-14-224": _CLIP}
        config = {
            "architectures": ["DeepseekOCRForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "vision_config": {"image_size": _SIDE, "width": width},
            "language_config": kept | {"use_mla": False, "first_k_dense_replace": 1},
        }
        file.write_text(json.dumps(config))
        tensors = load_file(path / "model.safetensors")
        assert "model.sam_model.blocks.0.attn.qkv.weight" in tensors
        assert "model.vision_model.transformer.layers.0.self_attn.qkv_proj.weight" in tensors
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def grid_of(self, image: Image.Image) -> tuple[int, int]:
        """Return the columns and rows of tiles of an image; 0 and 0 if it has none."""
        if max(image.size) <= self.tile:
            return 0, 0
        columns, rows = self.grid(image.size[::-1], (self.tile, self.tile), 2, self.settings["max_patches"])
        return columns, rows

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        made = self.images([image])
        columns, rows = self.grid_of(image)
        whole = {"pixels": np.asarray(made["pixel_values"])[0]}
        if not rows:
            return whole
        tiles = np.asarray(made["pixel_values_local"])
        return whole | {"tiles": tiles.reshape(rows, columns, *tiles.shape[1:])}

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        made = self.images(images, return_tensors="pt")
        inputs: dict[str, Any] = {name: made[name] for name in made if name != "num_local_patches"}
        grids = [self.grid_of(image) for image in images]
        inputs["num_local_patches"] = [columns * rows for columns, rows in grids]
        inputs["patches_grid"] = [[max(columns, 1), max(rows, 1)] for columns, rows in grids]
        out, *rest = text.split("<image>")
        for (columns, rows), part in zip(grids, rest, strict=True):
            out += "<image>" * (rows * 3 * (columns * 3 + 1) * (rows > 0) + 4 * 5 + 1) + part
        return dict(self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)) | inputs


def _deepseek_ocr() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(["<image>"])
    sam = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": 4,
        "window_size": 5,
        "global_attn_indexes": [1],
        "mlp_dim": 128,
        "output_channels": 8,
        "downsample_channels": [12, 24],
        "initializer_range": 0.2,
    }
    clip = {
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 12,
        "patch_size": 3,
    }
    text = STRONG | _EXPERTS | {"num_key_value_heads": 4, "sliding_window": 400}
    config = hf.UnlimitedOcrConfig(
        vision_config={"sam_config": sam, "encoder_config": clip},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return "UnlimitedOcrForConditionalGeneration", config, DeepseekOCRStand(tokenizer), "<image>"


DEEPSEEK: dict[str, Callable[[], tuple[str, Any, Any, str]]] = {"deepseek_ocr": _deepseek_ocr}
