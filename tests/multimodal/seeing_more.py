"""More tiny models that see: those whose processors need torchvision, or that transformers does not have."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from tiny_seeing import TEXT, VISION, Stand, make_tokenizer

_DEEPSEEK = TEXT | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _single(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert by itself."""
    out = {}
    for name, each in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if not layer or names is None:
            out[name] = each
            continue
        for i, expert in enumerate(each):
            for part, weight in zip(names, expert.chunk(len(names)), strict=True):
                out[f"{layer}.experts.{i}.{part}.weight"] = weight
    return out


class KimiStand(Stand):
    """Images of at most 64 patches, 16 a side, resized by Pillow, then padded with zeros."""

    settings = {
        "media_proc_cfg": {
            "in_patch_limit": 64,
            "patch_limit_on_one_side": 16,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        }
    }

    names = {
        "language_model.": "language_model.model.",
        "vision_tower.layers.": "vision_tower.encoder.blocks.",
        "vision_tower.final": "vision_tower.encoder.final",
        "pos_emb.position_embeddings": "pos_emb.weight",
        ".norm1.": ".norm0.",
        ".norm2.": ".norm1.",
        ".fc1.": ".fc0.",
        ".fc2.": ".fc1.",
        ".attn.proj.": ".wo.",
        "mm_projector.in_proj": "mm_projector.proj.0",
        "mm_projector.out_proj": "mm_projector.proj.2",
    }
    """What transformers calls the parts, and what Moonshot does."""

    def rewrite(self, path: Path, model: Any) -> None:
        tensors = {
            _renamed(name.removeprefix("model."), self.names): each
            for name, each in _single(model.state_dict()).items()
        }
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
        heads = model.config.vision_config.num_attention_heads
        for name in [name for name in tensors if ".attn.q_proj." in name]:
            q, k, v = (tensors.pop(name.replace(".q_", f".{each}_")) for each in "qkv")
            q, k = (each.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for each in (q, k))
            tensors[name.replace("attn.q_proj", "wqkv")] = torch.cat((q, k, v))
        save_file(
            {name: each.contiguous().clone() for name, each in tensors.items()}, path / "model.safetensors"
        )

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        width, height = image.size
        patches = max(width // 7, 1) * max(height // 7, 1)
        scale = min(1, (64 / patches) ** 0.5, 16 * 7 / width, 16 * 7 / height)
        width, height = (max(1, int(each * scale)) for each in (width, height))
        small = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        whole = np.zeros((-(-height // 14) * 14, -(-width // 14) * 14, 3))
        whole[:height, :width] = small
        cfg = self.settings["media_proc_cfg"]
        return ((whole / 255 - cfg["image_mean"]) / cfg["image_std"]).astype(np.float32).transpose(2, 0, 1)

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        pixels, grids, parts = [], [], text.split("<|media_pad|>")
        out = parts[0]
        for image, part in zip(images, parts[1:], strict=True):
            whole = torch.from_numpy(self.pixels(image))
            rows, columns = whole.shape[1] // 7, whole.shape[2] // 7
            pixels.append(whole.view(3, rows, 7, columns, 7).permute(1, 3, 0, 2, 4).flatten(0, 1))
            grids.append((1, rows, columns))
            out += "<|media_pad|>" * (rows * columns // 4) + part
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        return inputs | {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def _kimi_k25() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"])
    vision = {"patch_size": 7, "pos_emb_height": 6, "pos_emb_width": 6, "projection_hidden_size": 32}
    config = hf.Kimi_K25Config(
        vision_config=VISION | vision,
        text_config=hf.DeepseekV3Config(**_DEEPSEEK),
        projection_hidden_size=32,
        image_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        video_token_id=159,
        tie_word_embeddings=False,
    )
    return "Kimi_K25ForConditionalGeneration", config, KimiStand(tokenizer), "<|media_pad|>"


MORE: dict[str, Callable[[], tuple[str, Any, Any, str]]] = {
    "kimi_k25": _kimi_k25,
}
