"""Tiny models of Gemma 4: a small one with per-layer inputs, and one with bidirectional attention in
images."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tiny_seeing import STRONG, Stand, make_tokenizer

_MARKS = ["<|image|>", "<|image>", "<image|>"]
"""Placeholder token of images, and the tokens around it."""


class Gemma4Stand(Stand):
    """The image processor of transformers, since the whole processor needs one for videos."""

    settings = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70, "do_normalize": False}

    def __init__(self, tokenizer: Any) -> None:
        import transformers as hf

        super().__init__(tokenizer)
        self.images = hf.models.gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil(**self.settings)

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        output = self.images([image])
        places = np.asarray(output["image_position_ids"])[0]
        columns, rows = places.max(0) + 1
        patches = np.asarray(output["pixel_values"])[0][: rows * columns]
        grid = patches.reshape(rows, columns, 2, 2, 3).transpose(4, 0, 2, 1, 3)
        return {"pixels": grid.reshape(3, 2 * rows, 2 * columns).astype(np.float32)}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        parts = model.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
        return torch.cat(list(parts.pooler_output))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        mark, begin, end = _MARKS
        made = self.images(images, return_tensors="pt")
        out, *rest = text.split(mark)
        for count, part in zip(made["num_soft_tokens_per_image"], rest, strict=True):
            out += begin + mark * int(count) + end + part
        inputs = self.tokenizer(out, return_tensors="pt", return_token_type_ids=False)
        kinds = inputs["input_ids"] == self.tokenizer.convert_tokens_to_ids(mark)
        return inputs | {
            "pixel_values": made["pixel_values"],
            "image_position_ids": made["image_position_ids"],
            "mm_token_type_ids": kinds.int(),
        }


def _gemma4(vision: dict[str, Any], text: dict[str, Any]) -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(_MARKS)
    image, begin, end = tokenizer.convert_tokens_to_ids(_MARKS)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 2, "pooling_kernel_size": 2}
    sizes |= {"position_embedding_size": 150, "initializer_range": 0.2}
    config = hf.Gemma4Config(
        vision_config=sizes | vision,
        text_config=hf.Gemma4TextConfig(
            **STRONG | {"pad_token_id": 5},
            head_dim=16,
            global_head_dim=32,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"],
            **text,
        ),
        audio_config=None,
        image_token_id=image,
        boi_token_id=begin,
        eoi_token_id=end,
    )
    return "Gemma4ForConditionalGeneration", config, Gemma4Stand(tokenizer), _MARKS[0]


def _small() -> tuple[str, Any, Any, str]:
    """Build a model with per-layer inputs and clipped layers, like Gemma 4 E2B."""
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160}
    family, config, processor, mark = _gemma4(
        {"use_clipped_linears": True, "standardize": True}, inputs | {"use_bidirectional_attention": None}
    )

    def build(config: Any) -> Any:
        import transformers as hf

        model = hf.Gemma4ForConditionalGeneration(config)
        for name, tensor in model.named_buffers():
            if name.endswith(("_min", "_max")):
                tensor.fill_(-1.5 if name.endswith("min") else 1.2)
            elif ".std_" in name:
                tensor.fill_(0.5)
        return model

    return build, config, processor, mark  # type: ignore[return-value]


def _large() -> tuple[str, Any, Any, str]:
    """Build a model with images that are bidirectional in the sliding window, like Gemma 4 31B."""
    return _gemma4({}, {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"})


GEMMA4: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {"gemma4": _small, "gemma4_whole": _large}
