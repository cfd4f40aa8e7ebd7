"""More tiny vision models: those with processors that need torchvision, or that transformers does not
have."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from published import Step3VL, dots, step
from safetensors.torch import save_file
from seeing_minicpm import MINICPM
from seeing_stands import STANDS
from tiny_seeing import STRONG, TEXT, VISION, Stand, make_tokenizer

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
    """Split the weights of the experts into single tensors."""
    out = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if not layer or names is None:
            out[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            for part, weight in zip(names, expert.chunk(len(names)), strict=True):
                out[f"{layer}.experts.{i}.{part}.weight"] = weight
    return out


class KimiStand(Stand):
    """Processor of Kimi: images of at most 64 patches, 16 per side, resized by Pillow, then padded with
    zeros."""

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
    """Names of the submodules in transformers and in Moonshot's checkpoints."""

    def rewrite(self, path: Path, model: Any) -> None:
        tensors = {
            _renamed(name.removeprefix("model."), self.names): item
            for name, item in _single(model.state_dict()).items()
        }
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
        heads = model.config.vision_config.num_attention_heads
        for name in [name for name in tensors if ".attn.q_proj." in name]:
            q, k, v = (tensors.pop(name.replace(".q_", f".{item}_")) for item in "qkv")
            q, k = (item.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for item in (q, k))
            tensors[name.replace("attn.q_proj", "wqkv")] = torch.cat((q, k, v))
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
            path / "model.safetensors",
        )

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        width, height = image.size
        patches = max(width // 7, 1) * max(height // 7, 1)
        scale = min(1, (64 / patches) ** 0.5, 16 * 7 / width, 16 * 7 / height)
        width, height = (max(1, int(item * scale)) for item in (width, height))
        small = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        whole = np.zeros((-(-height // 14) * 14, -(-width // 14) * 14, 3))
        whole[:height, :width] = small
        cfg = self.settings["media_proc_cfg"]
        finished = (whole / 255 - cfg["image_mean"]) / cfg["image_std"]
        return {"pixels": finished.astype(np.float32).transpose(2, 0, 1)}

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        pixels, grids, parts = [], [], text.split("<|media_pad|>")
        out = parts[0]
        for image, part in zip(images, parts[1:], strict=True):
            whole = torch.from_numpy(self.pixels(image)["pixels"])
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


class DotsStand(Stand):
    """Processor of dots.ocr: that of Qwen2-VL, with one frame per patch."""

    settings = {"patch_size": 7, "temporal_patch_size": 1, "min_pixels": 784, "max_pixels": 6000}

    def __init__(self, tokenizer: Any) -> None:
        from transformers import Qwen2VLImageProcessorPil

        super().__init__(tokenizer)
        self.images = Qwen2VLImageProcessorPil(**self.settings)

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        made = self.images([image], return_tensors="np")
        return {"pixels": made["pixel_values"].reshape(*made["image_grid_thw"][0], -1)}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.as_tensor(model.seen(inputs))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        made, parts = self.images(images, return_tensors="pt"), text.split("<|imgpad|>")
        counts = (made["image_grid_thw"].prod(-1) // 4).tolist()
        out = parts[0] + "".join(
            "<|imgpad|>" * count + part for count, part in zip(counts, parts[1:], strict=True)
        )
        return self.tokenizer(out, return_tensors="pt", return_token_type_ids=False) | dict(made)


def _dots_ocr() -> tuple[Any, Any, Any, str]:
    tokenizer = make_tokenizer(["<|img|>", "<|imgpad|>", "<|endofimg|>"])
    config = TEXT | {
        "architectures": ["DotsOCRForCausalLM"],
        "model_type": "dots_ocr",
        "image_token_id": tokenizer.convert_tokens_to_ids("<|imgpad|>"),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vision_config": {
            "embed_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 7,
            "post_norm": True,
            "rms_norm_eps": 1e-5,
        },
    }
    return dots, config, DotsStand(tokenizer), "<|imgpad|>"


class StepStand(Stand):
    """Processor of Step3: squares of 56 pixels, windows of 42, images of at most 100 pixels per side."""

    settings = {"patch_size": 42, "max_image_size": 100}

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        windows, whole = self.cut(image)
        arrays = {"pixels": self.sized(whole, 56)}
        rows = [item for row in windows for item in row]
        return arrays | ({"windows": np.stack([self.sized(item, 42) for item in rows])} if rows else {})

    def sized(self, image: Image.Image, side: int) -> NDArray[Any]:
        """Resize tensors as torchvision does, after normalization."""
        mean, std = (torch.tensor(item).double()[:, None, None] for item in (_CLIP_MEAN, _CLIP_STD))
        numbers = torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255
        normal = ((numbers - mean) / std)[None]
        size = {"size": (side, side), "mode": "bilinear", "antialias": True}
        return torch.nn.functional.interpolate(normal, **size)[0].float().numpy()

    def cut(self, image: Image.Image) -> tuple[list[list[Image.Image]], Image.Image]:
        """Return the rows of windows, and the whole image."""
        width, height = image.size
        if min(image.size) < 32 and (width / height > 4 or width / height < 1 / 4):
            square = Image.new("RGB", (max(image.size), max(image.size)), 0)
            square.paste(image, (0, 0))
            image = square
            width, height = image.size
        if max(image.size) > 100:
            scale = 100 / max(image.size)
            width, height = int(width * scale), int(height * scale)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        long, short = max(width, height), min(width, height)
        if long <= 56:
            side = short if long / short > 1.5 else 0
        else:
            side = min(short, 42) if long / short > 4 else 42
        if not side:
            return [], image

        def rounded(length: int) -> int:
            ratio = length / side
            if ratio < 1:
                return length
            return side * (int(ratio) + 1 if ratio - length // side > 0.2 else int(ratio))

        large = image.resize((rounded(width), rounded(height)), Image.Resampling.BILINEAR)
        columns, rows = (max(1, rounded(length) // side) for length in (width, height))
        return [
            [large.crop((x * side, y * side, x * side + side, y * side + side)) for x in range(columns)]
            for y in range(rows)
        ], image

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.as_tensor(model.seen(inputs["squares"]))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        squares, parts = [], text.split("<im_patch>")
        out = parts[0]
        for image, part in zip(images, parts[1:], strict=True):
            windows, whole = self.cut(image)
            squares += [torch.from_numpy(self.sized(item, 42)) for row in windows for item in row]
            squares.append(torch.from_numpy(self.sized(whole, 56)))
            place = "<im_patch>" * 4
            rows = [f"<patch_start>{place}<patch_end>" * len(row) for row in windows]
            out += "<patch_newline>".join(rows) + f"<im_start>{place}<im_end>" + part
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        return inputs | {"squares": squares}


class Step37Stand(StepStand):
    """Processor of Step-3.7, whose model takes windows and whole images separately."""

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        inputs = dict(super().__call__(images, text, return_tensors))
        counts = [sum(map(len, self.cut(image)[0])) for image in images]
        wholes, windows, squares = [], [], iter(inputs.pop("squares"))
        for count in counts:
            windows += [next(squares) for _ in range(count)]
            wholes.append(next(squares))
        local = torch.stack(windows) if windows else None
        of_images = {"pixel_values": torch.stack(wholes), "pixel_values_local": local}
        return inputs | of_images | {"num_local_patches": counts}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.cat(list(model.get_image_features(**inputs).pooler_output))


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def _step_vl() -> tuple[Any, Any, Any, str]:
    marks = ["<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>", "<im_patch>"]
    tokenizer = make_tokenizer(marks)
    config = {
        "architectures": ["StepVLForConditionalGeneration"],
        "model_type": "step_robotics",
        "image_token_id": tokenizer.convert_tokens_to_ids("<im_patch>"),
        "projector_bias": False,
        "text_config": TEXT
        | {"model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        "vision_config": {
            "width": 32,
            "layers": 3,
            "heads": 2,
            "mlp_ratio": 2.0,
            "image_size": 56,
            "patch_size": 7,
            "use_ln_post": False,
            "ls_init_value": 0.1,
        },
    }
    return step, config, StepStand(tokenizer), "<im_patch>"


def _step3() -> tuple[Any, Any, Any, str]:
    """Build the first Step3, which has other weights but the same windows and placeholders."""
    _, config, stand, mark = _step_vl()
    text = {
        "model_type": "step3_text",
        "head_dim": 16,
        "share_q_dim": 24,
        "moe_layers_enum": "1",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 24,
        "share_expert_dim": 24,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    config |= {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "projector_bias": True,
        "understand_projector_stride": 2,
        "text_config": STRONG | text,
        "vision_config": VISION | {"image_size": 56, "patch_size": 7, "output_hidden_size": 24},
    }
    return Step3VL, config, stand, mark


def _step37() -> tuple[Any, Any, Any, str]:
    import transformers as hf

    _, config, stand, mark = _step_vl()
    text = TEXT | {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 7,
        "num_sliding_attention_heads": 6,
        "rope_theta": [5000000.0, 10000.0, 10000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0],
        "moe_layers_enum": "1,2",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 24,
        "share_expert_dim": 24,
        "swiglu_limits": [0.0, 0.0, 0.1],
        "swiglu_limits_shared": [0.1, 0.0, 0.0],
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    vision_settings = {key: config[key] for key in ("image_token_id", "projector_bias", "vision_config")}

    def make(config: Any) -> Any:
        """Build a model that rotates patches by their column first: see `test_published.py`."""
        model = hf.Step3p7ForConditionalGeneration(config)
        rotary = model.model.vision_model.rotary_emb
        turns = rotary.recomposition_frequencies
        rotary.recomposition_frequencies = lambda freqs: turns(freqs.flip(1))
        return model

    return make, hf.Step3p7Config(text_config=text, **vision_settings), Step37Stand(stand.tokenizer), mark


MORE: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {
    "dots_ocr": _dots_ocr,
    "kimi_k25": _kimi_k25,
    "step3": _step3,
    "step37": _step37,
    "step_vl": _step_vl,
    **MINICPM,
    **STANDS,
}
