"""Tiny vision models: Command A Vision and LFM2-VL, with processors that need torchvision; PaddleOCR-VL."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tiny_seeing import STRONG, VISION, Stand, make_tokenizer, without_torchvision

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Cohere2VisionStand(Stand):
    """Processor of Command A Vision: at most four tiles of 28 pixels, in the grid for which an image is
    resized the least."""

    settings = {"size": {"height": 28, "width": 28}, "max_patches": 4, "crop_to_patches": True}

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        (width, height), best, nearest = image.size, (0, 0), (False, 0.0)
        for wide, high in [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]:
            scale = min(28 * wide / width, 28 * high / height)
            rank = (scale >= 1, 1 / scale if scale >= 1 else scale)
            if rank > nearest:
                nearest, best = rank, (wide, high)
        wide, high = best
        large = image.resize((28 * wide, 28 * high), Image.Resampling.BICUBIC)
        boxes = [(28 * x, 28 * y, 28 * x + 28, 28 * y + 28) for y in range(high) for x in range(wide)]
        tiles = [large.crop(box) for box in boxes]
        tiles += [image.resize((28, 28), Image.Resampling.BICUBIC)] if len(tiles) > 1 else []
        scaled = (np.stack([np.asarray(tile) for tile in tiles]) / 255 - _CLIP_MEAN) / _CLIP_STD
        return {"pixels": scaled.astype(np.float32).transpose(0, 3, 1, 2)}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.as_tensor(model.model.get_image_features(**inputs).pooler_output.flatten(0, 1))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        pixels = [torch.from_numpy(self.pixels(image)["pixels"]) for image in images]
        out, *parts = text.split("<|IMG_PATCH|>")
        for tiles, part in zip(pixels, parts, strict=True):
            spelled = ("<|IMG_PATCH|>" * 4 + "<|IMG_LINE_BREAK|>") * len(tiles)
            out += f"<|START_OF_IMG|>{spelled}<|END_OF_IMG|>{part}"
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        return inputs | {"pixel_values": torch.cat(pixels)}


def _cohere2_vision() -> tuple[str, Any, Any, str]:
    import transformers as hf

    marks = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"]
    tokenizer = make_tokenizer(marks)
    config = hf.Cohere2VisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7, vision_use_head=False),
        text_config=hf.Cohere2Config(**STRONG, head_dim=8, sliding_window=16, logit_scale=1.0),
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        alignment_intermediate_size=40,
    )
    return "Cohere2VisionForConditionalGeneration", config, Cohere2VisionStand(tokenizer), "<|IMG_PATCH|>"


class PaddleStand(Stand):
    """Processor of transformers for PaddleOCR-VL, with patches row by row instead of square by square."""

    settings = {"patch_size": 7, "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}

    def __init__(self, tokenizer: Any) -> None:
        import transformers as hf

        super().__init__(tokenizer)
        made = hf.models.paddleocr_vl.image_processing_pil_paddleocr_vl.PaddleOCRVLImageProcessorPil
        tokenizer._set_model_specific_special_tokens({"image_token": "<|IMAGE|>"})
        self.processor = hf.PaddleOCRVLProcessor(made(**self.settings), tokenizer)

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        result = self([image], "<|IMAGE|>", "pt")
        _, rows, columns = result["image_grid_thw"][0].tolist()
        patches = np.asarray(result["pixel_values"]).reshape(rows // 2, 2, columns // 2, 2, 3, 7, 7)
        return {"pixels": patches.swapaxes(1, 2).reshape(-1, 3, 7, 7)}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        vision_inputs = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        return torch.cat(list(model.model.get_image_features(**vision_inputs).pooler_output))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        return self.processor(images=images, text=text, return_tensors=return_tensors)


def _paddleocr_vl() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(["<|START|>", "<|END|>", "<|IMAGE|>", "<|VIDEO|>"])
    start, end, image, video = tokenizer.convert_tokens_to_ids(
        ["<|START|>", "<|END|>", "<|IMAGE|>", "<|VIDEO|>"]
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = hf.PaddleOCRVLConfig(
        vision_config=VISION | {"image_size": 28, "patch_size": 7},
        text_config=STRONG | {"head_dim": 16, "rope_parameters": rope, "tie_word_embeddings": False},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return "PaddleOCRVLForConditionalGeneration", config, PaddleStand(tokenizer), "<|IMAGE|>"


class Lfm2Stand(Stand):
    """Processor of LFM2-VL: sizes, grids and texts of transformers, with images resized by Pillow instead of
    torchvision."""

    settings = {
        "encoder_patch_size": 7,
        "tile_size": 28,
        "min_image_tokens": 4,
        "max_image_tokens": 9,
        "max_tiles": 4,
    }

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.sizes = without_torchvision("lfm2_vl")

    def layout(self, image: Image.Image) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return width and height of the whole image, and columns and rows of tiles."""
        made = self.sizes.Lfm2VlImageProcessor
        rows, columns = image.size[::-1]
        patches = {"max_image_tokens": 9, "encoder_patch_size": 7, "downsample_factor": 2}
        whole = made.smart_resize(None, rows, columns, min_image_tokens=4, **patches)
        grid = (1, 1)
        if made._is_image_too_large(None, rows, columns, max_pixels_tolerance=2.0, **patches):
            grid = made._get_grid_layout(object.__new__(made), rows, columns, 2, 4, 28)[:2]
        return whole, grid

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        whole, (wide, high) = self.layout(image)
        parts = {"pixels": np.asarray(image.resize(whole, Image.Resampling.BILINEAR))}
        if wide * high > 1:
            large = image.resize((28 * wide, 28 * high), Image.Resampling.BILINEAR)
            boxes = [(28 * x, 28 * y, 28 * x + 28, 28 * y + 28) for y in range(high) for x in range(wide)]
            parts["tiles"] = np.stack([np.asarray(large.crop(box)) for box in boxes])
        scaled = {name: (part / 255 - 0.5) / 0.5 for name, part in parts.items()}
        return {name: np.moveaxis(part, -1, -3).astype(np.float32) for name, part in scaled.items()}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.cat(model.model.get_image_features(**inputs).pooler_output)

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        import transformers as hf

        names = {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
        holder = SimpleNamespace(**names, image_thumbnail_token="<|img_thumbnail|>", image_token="<image>")
        patches, shapes = [], []
        out, *rest = text.split("<image>")
        for image, part in zip(images, rest, strict=True):
            (width, height), (columns, rows) = self.layout(image)
            pixels = self.pixels(image)
            for entry in [*pixels.get("tiles", ()), pixels["pixels"]]:
                shapes.append((entry.shape[1] // 7, entry.shape[2] // 7))
                grid = entry.reshape(3, shapes[-1][0], 7, shapes[-1][1], 7)
                patches.append(grid.transpose(1, 3, 2, 4, 0).reshape(-1, 147))
            count = width * height // 14**2
            build = hf.Lfm2VlProcessor._build_image_tokens
            out += build(holder, rows, columns, 4, count, True, True) + part
        longest = max(map(len, patches))
        padded = [np.pad(entry, ((0, longest - len(entry)), (0, 0))) for entry in patches]
        masks = [[1] * len(entry) + [0] * (longest - len(entry)) for entry in patches]
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        return inputs | {
            "pixel_values": torch.from_numpy(np.stack(padded)),
            "pixel_attention_mask": torch.tensor(masks),
            "spatial_shapes": torch.tensor(shapes),
        }


def _lfm2_vl() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    marks = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    tokenizer = make_tokenizer([*marks, *tiles])
    config = hf.Lfm2VlConfig(
        vision_config=VISION
        | {
            "model_type": "siglip2_vision_model",
            "num_patches": 16,
            "patch_size": 7,
            "vision_use_head": False,
        },
        text_config=hf.Lfm2Config(
            **STRONG, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=40,
    )
    return "Lfm2VlForConditionalGeneration", config, Lfm2Stand(tokenizer), "<image>"


STANDS: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {
    "cohere2_vision": _cohere2_vision,
    "lfm2_vl": _lfm2_vl,
    "paddleocr_vl": _paddleocr_vl,
}
