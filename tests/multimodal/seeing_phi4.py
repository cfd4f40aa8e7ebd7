"""Tiny model of Phi-4-multimodal, whose image processor needs torchvision: Pillow resizes in its place."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tiny_seeing import STRONG, VISION, Stand, make_tokenizer, without_torchvision

_SIDE, _PATCH, _TILES = 28, 7, 6
SETTINGS = {"dynamic_hd": _TILES, "size": {"height": _SIDE, "width": _SIDE}}
MARKS = ("<|image|>", "<|audio|>")
SOUND = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_blocks": 2,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "input_size": 20,
    "bias_max_distance": 9,
    "nemo_conv_channels": 24,
}


class Phi4Stand(Stand):
    """Image processor of transformers, with the resizing of Pillow."""

    settings = SETTINGS

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        module = without_torchvision("phi4_multimodal")
        module.tvF = SimpleNamespace(resize=_resize, pad=_pad)
        self.count = 0
        self.images = object.__new__(module.Phi4MultimodalImageProcessor)

    def tiles(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the whole image [3, side, side], its tiles [rows, columns, 3, side, side], and the mask of
        the patches that it fills."""
        raw = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        large, mask = self.images.dynamic_preprocess(raw, _SIDE, _PATCH, _SIDE // _PATCH, max_num=_TILES)
        pixels = (large / 255 - 0.5) / 0.5
        whole = torch.nn.functional.interpolate(pixels[None], (_SIDE, _SIDE), mode="bicubic")[0]
        grid = pixels.unfold(1, _SIDE, _SIDE).unfold(2, _SIDE, _SIDE).permute(1, 2, 0, 3, 4)
        return whole, grid, mask

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        whole, grid, mask = self.tiles(image)
        filled = np.array([mask[:, 0].sum(), mask[0].sum()])
        return {"whole": whole.numpy(), "pixels": grid.numpy(), "filled": filled}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        count = self.count
        ids = torch.full((1, count), model.config.vision_config.image_token_id)
        out: torch.Tensor = model.model.embed_tokens_extend.image_embed(
            ids, torch.zeros(1, count, 32), **inputs
        )
        return out[0]

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        squares, masks, sizes, counts = [], [], [], []
        side = _SIDE // _PATCH
        for image in images:
            whole, grid, mask = self.tiles(image)
            squares.append(torch.cat((whole[None], grid.flatten(0, 1))))
            tiles = mask.unfold(0, side, side).unfold(1, side, side).flatten(0, 1)
            masks.append(torch.cat((torch.ones(1, side, side), tiles)))
            sizes.append([_SIDE * grid.shape[0], _SIDE * grid.shape[1]])
            pooled = mask[::2, ::2]
            counts.append(int(pooled.sum() + pooled[:, 0].sum()) + 1 + side // 2 * (side // 2 + 1))
        self.count, most = sum(counts), max(map(len, squares))
        for stack, empty in ((squares, torch.zeros(3, _SIDE, _SIDE)), (masks, torch.ones(side, side))):
            for i, item in enumerate(stack):
                stack[i] = torch.cat((item, empty.expand(most - len(item), *empty.shape)))
        out, *rest = text.split("<|image|>")
        for count, part in zip(counts, rest, strict=True):
            out += "<|image|>" * count + part
        inputs = dict(self.tokenizer(out, return_tensors="pt", return_token_type_ids=False))
        return inputs | {
            "image_pixel_values": torch.stack(squares),
            "image_attention_mask": torch.stack(masks),
            "image_sizes": torch.tensor(sizes),
        }


def _resize(pixels: torch.Tensor, size: list[int]) -> torch.Tensor:
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    return torch.from_numpy(np.array(image.resize(size[::-1], Image.Resampling.BILINEAR))).permute(2, 0, 1)


def _pad(pixels: torch.Tensor, sides: list[int], fill: list[int]) -> torch.Tensor:
    _, _, right, below = sides
    return torch.nn.functional.pad(pixels, (0, right, 0, below), value=fill[0])


def phi4() -> tuple[Any, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(MARKS)
    image, audio = tokenizer.convert_tokens_to_ids(list(MARKS))
    vision = {"image_size": _SIDE, "patch_size": _PATCH, "crop_size": _SIDE, "image_token_id": image}
    config = hf.Phi4MultimodalConfig(
        **STRONG | {"pad_token_id": 0, "eos_token_id": 159},
        vision_config=VISION | vision,
        audio_config=SOUND | {"audio_token_id": audio},
        tie_word_embeddings=True,
        attn_implementation="eager",  # others make the encoders causal where no patch is masked
    )
    return build, config, Phi4Stand(tokenizer), "<|image|>"


@torch.no_grad()
def build(config: Any) -> Any:
    """Build a model with smaller weights of the encoder, in which errors do not grow."""
    import transformers as hf

    model = hf.Phi4MultimodalForCausalLM(config)
    for name, weight in model.named_parameters():
        if ".img_processor." in name and weight.ndim == 2:
            weight.mul_(0.2)
    return model


PHI4: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {"phi4": phi4}
