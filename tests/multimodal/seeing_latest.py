"""More families that see, of those that transformers has."""

from collections.abc import Callable
from typing import Any

from tiny_seeing import STRONG, VISION, make_tokenizer


def _paligemma() -> tuple[str, Any, Any, str]:
    """All of a prompt sees itself."""
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
        attn_implementation="eager",  # with others a text without images sees itself as well
    )
    return "PaliGemmaForConditionalGeneration", config, processor, "<image>"


LATEST: dict[str, Callable[[], tuple[Any, Any, Any, str]]] = {
    "paligemma": _paligemma,
    "paligemma2": _paligemma2,
}
