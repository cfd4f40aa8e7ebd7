"""Tiny models of more vision families: PaliGemma and Ovis 2."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tiny_seeing import STRONG, VISION, Stand, make_tokenizer


def _paligemma() -> tuple[str, Any, Any, str]:
    """Build PaliGemma, with a bidirectional prompt."""
    import transformers as hf

    return _pali(hf.GemmaConfig(**STRONG, head_dim=16))


def _paligemma2() -> tuple[str, Any, Any, str]:
    import transformers as hf

    sizes = {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16}
    return _pali(hf.Gemma2Config(**STRONG, **sizes, final_logit_softcapping=None))


def _pali(text: Any) -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(["<image>", "<bos>"])
    tokenizer.bos_token = "<bos>"
    tokenizer._set_model_specific_special_tokens({"image_token": "<image>"})
    images = hf.models.siglip.image_processing_pil_siglip.SiglipImageProcessorPil(
        size={"height": 28, "width": 28}
    )
    images.image_seq_length = 4
    processor = hf.PaliGemmaProcessor(images, tokenizer)
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=28, patch_size=14, vision_use_head=False),
        text_config=text,
        image_token_index=processor.image_token_id,
        projection_dim=32,
        attn_implementation="eager",  # others make text-only prompts bidirectional, too
    )
    return "PaliGemmaForConditionalGeneration", config, processor, "<image>"


class OvisStand(Stand):
    """Processor of transformers for Ovis 2, in which markers have embeddings, too."""

    settings = {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 5}

    def __init__(self, tokenizer: Any) -> None:
        import transformers as hf

        super().__init__(tokenizer)
        images = hf.models.ovis2.image_processing_pil_ovis2.Ovis2ImageProcessorPil(**self.settings)
        self.processor = hf.Ovis2Processor(images, tokenizer, image_seq_length=4)
        self.ids = torch.empty(0)

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        output = self.processor.image_processor(images=[image], return_tensors="np")
        return {"pixels": output["pixel_values"], "grid": np.zeros(output["grids"][0])}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        output = model.model.get_image_features(pixel_values=inputs["pixel_values"])
        words = [output.pooler_output.flatten(0, 1), *output.visual_indicator_features.split(1)]
        out = torch.zeros(len(self.ids), 32)
        marks = [model.config.image_token_id, *model.config.visual_indicator_token_ids]
        for mark, vector in zip(marks, words, strict=True):
            out[self.ids == mark] = vector
        return out[torch.isin(self.ids, torch.tensor(marks))]

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        output = self.processor(images=images, text=text, return_tensors=return_tensors)
        self.ids = output["input_ids"][0]
        return output


def _ovis2() -> tuple[str, Any, Any, str]:
    import transformers as hf

    names = ["<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    tokenizer = make_tokenizer(["<image>", *names])
    atom, *marks = tokenizer.convert_tokens_to_ids(names)
    vision = {"image_size": 28, "patch_size": 7, "hidden_stride": 2, "vocab_size": 60, "qkv_bias": True}
    config = hf.Ovis2Config(
        vision_config=VISION | vision | {"initializer_range": 0.2},
        text_config=hf.Qwen2Config(**STRONG),
        image_token_id=atom,
        visual_indicator_token_ids=marks,
        hidden_size=32,
        vocab_size=160,
        tie_word_embeddings=False,
    )
    return "Ovis2ForConditionalGeneration", config, OvisStand(tokenizer), "<image>"


LATEST: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {
    "ovis2": _ovis2,
    "paligemma": _paligemma,
    "paligemma2": _paligemma2,
}
