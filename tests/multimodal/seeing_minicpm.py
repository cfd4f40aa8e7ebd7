"""Tiny models of MiniCPM-V, and replacements for processors of transformers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from published import OlderMiniCPM
from tiny_seeing import TEXT, VISION, Stand, make_tokenizer


class MiniCPMStand(Stand):
    """Processor of transformers for MiniCPM-V 4.6, without its part for videos."""

    settings = {"scale_resolution": 56, "patch_size": 7, "max_slice_nums": 4, "image_mean": [0.5, 0.4, 0.3]}
    place = "<|image_pad|>"
    unit = 4
    """Number of patches per side that are merged into one embedding."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.minicpmv4_6 import image_processing_pil_minicpmv4_6 as pil

        super().__init__(tokenizer)
        self.images = pil.MiniCPMV4_6ImageProcessorPil(**self.settings)

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        made = self.images([image], return_tensors="np")
        squares, done = [], 0
        for rows, columns in made["target_sizes"]:
            flat = made["pixel_values"][0, :, :, done : done + rows * columns * 7]
            done += rows * columns * 7
            square = flat.reshape(3, 7, rows, columns, 7).transpose(0, 2, 1, 3, 4)
            squares.append(square.reshape(3, rows * 7, columns * 7))
        return {"pixels": squares[0]} | ({"slices": np.stack(squares[1:])} if squares[1:] else {})

    def rewrite_text(self, made: Any, number: int) -> str:
        from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

        named = {
            f"{name}_{end}_token": f"<{'/' * (end == 'end')}{name}>"
            for name in ("image", "slice")
            for end in ("start", "end")
        }
        processor = SimpleNamespace(image_token=self.place, slice_mode=True, **named)
        text = MiniCPMV4_6Processor.replace_image_token(
            processor, made, number, image_token_divisor=self.unit**2
        )
        return f"<image_id>{number}</image_id>{text}"

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        made, parts = self.images(images, return_tensors="pt"), text.split(self.place)
        out = parts[0] + "".join(self.rewrite_text(made, i) + part for i, part in enumerate(parts[1:]))
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        return inputs | {name: made[name] for name in ("pixel_values", "target_sizes")}


_SLICES = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]


def _minicpm_v46() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer([*_SLICES, "<|image_pad|>", "<|video_pad|>"])
    config = hf.MiniCPMV4_6Config(
        vision_config=VISION | {"image_size": 70, "patch_size": 7},
        text_config=hf.Qwen3Config(**TEXT, head_dim=16),
        insert_layer_id=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    return "MiniCPMV4_6ForConditionalGeneration", config, MiniCPMStand(tokenizer), "<|image_pad|>"


class OlderMiniCPMStand(MiniCPMStand):
    """Processor of MiniCPM-V 2.6 to 4.5: sides are whole patches; each square has as many embeddings as the
    resampler has queries."""

    settings = {
        "scale_resolution": 56,
        "max_slice_nums": 4,
        "norm_mean": [0.5, 0.4, 0.3],
        "norm_std": [0.5, 0.5, 0.5],
        "use_image_id": True,
    }

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.minicpmv4_6 import image_processing_pil_minicpmv4_6 as pil

        Stand.__init__(self, tokenizer)
        self.grids = pil.MiniCPMV4_6ImageProcessorPil()

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        def sized(width: float, height: float, grows: bool) -> tuple[int, int]:
            if width * height > 56**2 or grows:
                ratio = width / height
                height = int(56 / ratio**0.5)
                width = int(height * ratio)
            return max(round(width / 7), 1) * 7, max(round(height / 7), 1) * 7

        def numbers(size: tuple[int, int]) -> NDArray[Any]:
            pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC)) / 255
            return ((pixels - [0.5, 0.4, 0.3]) / 0.5).astype(np.float32).transpose(2, 0, 1)

        (width, height), grid = image.size, self.grids.get_sliced_grid(image.size[::-1], 4, 56)
        whole = {"pixels": numbers(sized(width, height, grid is None))}
        if grid is None:
            return whole
        rows, columns = grid
        wide, high = sized(max(round(width / columns), 1), max(round(height / rows), 1), True)
        large = numbers((wide * columns, high * rows))
        slices = [
            large[:, row * high : row * high + high, column * wide : column * wide + wide]
            for row in range(rows)
            for column in range(columns)
        ]
        return whole | {"slices": np.stack(slices)}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.cat([model.seen(square) for square in inputs["squares"]])

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        squares, parts = [], text.split("(<image>./</image>)")
        out = parts[0]
        for i, (image, part) in enumerate(zip(images, parts[1:], strict=True)):
            made = self.pixels(image)
            squares += [torch.from_numpy(item.copy()) for item in (made["pixels"], *made.get("slices", ()))]
            grid = self.grids.get_sliced_grid(image.size[::-1], 4, 56) or (0, 0)
            out += self.written(i, *grid) + part
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        return inputs | {"squares": squares}

    def written(self, number: int, rows: int, columns: int) -> str:
        slices = "\n".join([f"<slice>{'<unk>' * 4}</slice>" * columns] * rows)
        return f"<image_id>{number}</image_id><image>{'<unk>' * 4}</image>{slices}"


class MiniCPM25Stand(OlderMiniCPMStand):
    """Processor of MiniCPM-V 2.5: images have no numbers, and all slices are within one pair of slice
    tokens."""

    settings = {name: item for name, item in OlderMiniCPMStand.settings.items() if name != "use_image_id"}

    def written(self, number: int, rows: int, columns: int) -> str:
        whole = f"<image>{'<unk>' * 4}</image>"
        return whole + ("<slice>" + "\n".join([whole * columns] * rows) + "</slice>") * (rows > 0)


def _minicpm_v(version: float) -> Callable[[], tuple[Any, Any, Any, str]]:
    def made() -> tuple[Any, Any, Any, str]:
        config = TEXT | {
            "architectures": ["MiniCPMV"],
            "model_type": "minicpmv",
            "version": version,
            "query_num": 4,
            "hidden_size": 256,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vision_config": VISION | {"image_size": 70, "patch_size": 7},
        }
        stand = MiniCPM25Stand if version == 2.5 else OlderMiniCPMStand
        return OlderMiniCPM, config, stand(make_tokenizer(_SLICES)), "(<image>./</image>)"

    return made


MINICPM: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {
    "minicpm_v25": _minicpm_v(2.5),
    "minicpm_v26": _minicpm_v(2.6),
    "minicpm_v45": _minicpm_v(4.5),
    "minicpm_v46": _minicpm_v46,
}
