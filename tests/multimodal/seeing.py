"""Tiny vision models, each with a transformers model, a tokenizer and a processor."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from finished import finished
from PIL import Image
from safetensors.torch import load_file, save_file
from seeing_deepseek import DEEPSEEK
from seeing_deepseek2 import DEEPSEEK2
from seeing_gemma4 import GEMMA4
from seeing_latest import LATEST
from seeing_more import MORE
from seeing_phi4 import PHI4
from tiny_engine import load_tower
from tiny_seeing import STRONG, TEXT, VISION, Stand, make_tokenizer, save_tiny
from tiny_seeing import close as close
from tiny_seeing import picture as picture
from tiny_seeing import sizes as sizes

from quire.checkpoint.model import read_checkpoint
from quire.multimodal.placeholders import place
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import PROCESSORS, rewrites_text
from quire.text.tokenizer import load_tokenizer


class Twin:
    """A tiny checkpoint of a vision family, with the model and processor of transformers, and our processor
    and encoder."""

    def __init__(self, path: Path, family: str) -> None:
        self.path = path
        self.architecture, config, self.processor, self.mark = FAMILIES[family]()
        self.model = save_tiny(path, self.architecture, config, self.processor)
        self.reread()

    def reread(self) -> None:
        """Read the checkpoint from disk again."""
        self.checkpoint = read_checkpoint(self.path)
        media = self.checkpoint.facts.media
        assert media is not None
        self.media = media
        self.tokenizer = load_tokenizer(self.path, "hf")
        self.ours = PROCESSORS[media.family](self.path, media, self.tokenizer)
        image_id: int | None = getattr(self.ours, "image_id", None)
        self.image_id = media.tower.image_id if image_id is None else image_id
        self.image_ids = {self.image_id, *getattr(media.tower, "mark_ids", ())}
        """Token ids that have embeddings."""
        self.least = 20 if media.family in ("lighton_ocr", "phi4") else 5
        """Smallest side of images in pixels: if long images are resized, a shorter side may have no pixels
        left."""
        if isinstance(self.processor, Stand):
            self.processor.ours = self.ours

    def tower(self, **options: Any) -> Any:
        return load_tower(self.path, **options)

    def features(self, inputs: Any) -> torch.Tensor:
        """Return the embeddings of all images by transformers."""
        if isinstance(self.processor, Stand):
            return self.processor.features(self.model, inputs)
        result = self.model.model.get_image_features(**inputs).pooler_output
        return torch.cat([item.reshape(-1, item.shape[-1]) for item in result])

    def inputs(self, text: str, images: list[Image.Image]) -> Any:
        """Return the inputs of the model that transformers' processor makes of a prompt and its images."""
        return self.processor(images=images, text=text, return_tensors="pt")

    def token_ids(self, text: str, images: list[Image.Image]) -> list[int]:
        """Return the tokens of the prompt with images in our implementation, after a check of its items."""
        processed = [self.ours.process("image", image, {}) for image in images]
        ready = [PreparedItem("image", b"%d" % i, entry) for i, entry in enumerate(processed)]
        if rewrites_text(self.ours):
            text = self.ours.rewrite_text(text)
        tokens, media = place(self.tokenizer.encode(text), ready, self.ours)
        places = [at for item in media.items for first, n in item.places() for at in range(first, first + n)]
        assert places == [at for at, token in enumerate(tokens) if token in self.image_ids]
        return tokens


def _llava() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tokenizer = make_tokenizer(["<image>"])
    images = hf.models.llava.image_processing_pil_llava.LlavaImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor = hf.LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION, image_size=28, patch_size=14),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_index=processor.image_token_id,
    )
    return "LlavaForConditionalGeneration", config, processor, "<image>"


def _gemma3() -> tuple[str, Any, Any, str]:
    import transformers as hf

    marks = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    tokenizer = make_tokenizer(marks)
    for name, mark in zip(("boi_token", "image_token", "eoi_token"), marks, strict=True):
        tokenizer._set_model_specific_special_tokens({name: mark})
    images = hf.models.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil(
        size={"height": 56, "width": 56}
    )
    processor = hf.Gemma3Processor(images, tokenizer, image_seq_length=4)
    begin, image, end = tokenizer.convert_tokens_to_ids(list(marks))
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=56, patch_size=14, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=16),
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    return "Gemma3ForConditionalGeneration", config, processor, marks[0]


def _internvl() -> tuple[str, Any, Any, str]:
    import transformers as hf

    marks = {
        "start_image_token": "<img>",
        "context_image_token": "<IMG_CONTEXT>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    tokenizer = make_tokenizer(list(marks.values()))
    tokenizer._set_model_specific_special_tokens(marks)
    images = hf.models.got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, max_patches=6
    )

    class Processor(hf.InternVLProcessor):
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Accept any class: the video processor needs torchvision."""

    Processor.__name__ = "InternVLProcessor"
    processor = Processor(images, tokenizer, image_seq_length=4)
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(
            **VISION, image_size=[28, 28], patch_size=[7, 7], use_qk_norm=True, attention_bias=True
        ),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_id=processor.image_token_id,
        image_seq_length=4,
    )
    return "InternVLForConditionalGeneration", config, processor, "<IMG_CONTEXT>"


def _qianfan_ocr() -> tuple[Any, Any, Any, str]:
    """Build a model that is stored as published, while transformers writes `encoder.layers` for the decoder's
    layers, too."""
    import transformers as hf

    def build(config: Any) -> Any:
        model = hf.QianfanOCRForConditionalGeneration(config)
        save = model.save_pretrained

        def save_as_published(path: Path) -> None:
            save(path)
            tensors = load_file(path / "model.safetensors")
            names = {name: name.replace("model.model.encoder.", "model.model.") for name in tensors}
            save_file({names[name]: tensor for name, tensor in tensors.items()}, path / "model.safetensors")

        model.save_pretrained = save_as_published
        return model

    _, like, parts, _ = _internvl()
    tokenizer = parts.tokenizer
    processor = hf.QianfanOCRProcessor(parts.image_processor, tokenizer, image_seq_length=4)
    vision = VISION | {"image_size": [28, 28], "patch_size": [7, 7]}
    config = hf.QianfanOCRConfig(
        vision_config=vision,
        text_config=hf.Qwen3Config(**STRONG, head_dim=16),
        image_token_id=like.image_token_id,
        image_seq_length=4,
    )
    return build, config, processor, "<image>"


def _pixtral_parts(merge: int) -> tuple[Any, Any]:
    import transformers as hf
    from transformers.models.pixtral import image_processing_pil_pixtral as with_pillow

    # The processor imports the other module, which needs torchvision, for a function that both have.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", with_pillow)
    tokenizer = make_tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    images = with_pillow.PixtralImageProcessorPil(
        size={"longest_edge": 84}, patch_size={"height": 7, "width": 7}
    )
    module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    processor = module.PixtralProcessor(images, tokenizer, patch_size=7, spatial_merge_size=merge)
    return processor, hf.PixtralVisionConfig(**VISION, image_size=84, patch_size=7)


def _pixtral() -> tuple[str, Any, Any, str]:
    import transformers as hf

    processor, vision = _pixtral_parts(1)
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=hf.MistralConfig(**TEXT, head_dim=16),
        image_token_index=processor.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return "LlavaForConditionalGeneration", config, processor, "[IMG]"


def _mistral3() -> tuple[str, Any, Any, str]:
    import transformers as hf

    processor, vision = _pixtral_parts(2)
    config = hf.Mistral3Config(
        vision_config=vision,
        text_config=hf.MistralConfig(**TEXT, head_dim=16),
        image_token_index=processor.image_token_id,
    )
    return "Mistral3ForConditionalGeneration", config, processor, "[IMG]"


def _lighton_ocr() -> tuple[str, Any, Any, str]:
    """Build a model with images of whole patches per side, but not of whole squares of merged patches."""
    import transformers as hf

    parts, vision = _pixtral_parts(2)
    tokenizer = parts.tokenizer
    for name, mark in zip(("", "_break", "_end"), ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), strict=True):
        tokenizer._set_model_specific_special_tokens({f"image{name}_token": mark})
    processor = hf.LightOnOcrProcessor(parts.image_processor, tokenizer, patch_size=7, spatial_merge_size=2)
    config = hf.LightOnOcrConfig(
        vision_config=vision,
        text_config=hf.Qwen3Config(**STRONG, head_dim=16),
        image_token_id=processor.image_token_id,
        tie_word_embeddings=False,
    )
    return "LightOnOcrForConditionalGeneration", config, processor, "[IMG]"


def _aya_vision() -> tuple[str, Any, Any, str]:
    import transformers as hf

    tiles = [f"TILE_{number}" for number in range(1, 3)]  # the others are several tokens
    marks = ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", *tiles, "TILE_GLOBAL"]
    images = hf.models.got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, max_patches=6
    )
    tokenizer = make_tokenizer(marks)
    tokenizer.pad_token = "<unk>"
    processor = hf.AyaVisionProcessor(images, tokenizer, patch_size=7, img_size=28, downsample_factor=2)
    config = hf.AyaVisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7, vision_use_head=False),
        text_config=hf.Cohere2Config(**STRONG, head_dim=8, sliding_window=16, logit_scale=1.0),
        image_token_index=processor.image_token_id,
        vision_feature_layer=-2,
        alignment_intermediate_size=40,
    )
    return "AyaVisionForConditionalGeneration", config, processor, "<image>"


def _llava_next(**kwargs: Any) -> tuple[str, Any, Any, str]:
    import transformers as hf

    shapes = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    images = hf.models.llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=shapes
    )
    processor = hf.LlavaNextProcessor(
        images,
        make_tokenizer(["<image>"]),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config = hf.LlavaNextConfig(
        **{
            "vision_config": hf.CLIPVisionConfig(**VISION, image_size=28, patch_size=7),
            "text_config": hf.MistralConfig(**TEXT),
            "image_token_index": processor.image_token_id,
            "image_grid_pinpoints": shapes,
            **kwargs,
        }
    )
    return "LlavaNextForConditionalGeneration", config, processor, "<image>"


def _llava_next_video() -> tuple[str, Any, Any, str]:
    import transformers as hf

    _, config, parts, _ = _llava_next()
    tokenizer = make_tokenizer(["<image>", "<video>"])

    class Processor(hf.LlavaNextVideoProcessor):
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Accept any class: the video processor needs torchvision."""

    Processor.__name__ = "LlavaNextVideoProcessor"
    processor = Processor(
        image_processor=parts.image_processor,
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    config = hf.LlavaNextVideoConfig(
        vision_config=config.vision_config,
        text_config=config.text_config,
        image_grid_pinpoints=config.image_grid_pinpoints,
        image_token_index=image,
        video_token_index=video,
    )
    return "LlavaNextVideoForConditionalGeneration", config, processor, "<image>"


def _granite_vision() -> tuple[str, Any, Any, str]:
    """Build a model with the hidden states of several encoder layers, scaled embeddings, and images among
    them."""
    import transformers as hf

    scales = {"embedding_multiplier": 5.0, "residual_multiplier": 0.5}
    return _llava_next(
        text_config=hf.GraniteConfig(**STRONG, **scales, attention_multiplier=0.2),
        vision_feature_layer=[-3, -1],
    )


def _llava_onevision() -> tuple[str, Any, Any, str]:
    import transformers as hf

    sides = (28, 56, 84)
    shapes = [[high, wide] for high in sides for wide in sides]
    images = hf.models.llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=shapes, image_mean=[0.5, 0.4, 0.3]
    )

    class Processor(hf.LlavaOnevisionProcessor):
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Accept any class: the video processor needs torchvision."""

    processor = Processor(
        images,
        make_tokenizer(["<image>", "<video>"]),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_3",
    )
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=shapes,
        vision_aspect_ratio="anyres_max_3",
    )
    return "LlavaOnevisionForConditionalGeneration", config, processor, "<image>"


def _idefics3() -> tuple[str, Any, Any, str]:
    import transformers as hf

    names = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    tokenizer = make_tokenizer(["<fake_token_around_image>", "<image>", "<global-img>", *names, "<end>"])
    images = hf.models.idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil(
        size={"longest_edge": 70}, max_image_size={"longest_edge": 28}
    )
    processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=4)
    config = hf.Idefics3Config(
        vision_config=VISION | {"image_size": 28, "patch_size": 7},
        text_config=hf.LlamaConfig(**TEXT),
        image_token_id=processor.image_token_id,
    )
    return "Idefics3ForConditionalGeneration", config, processor, "<image>"


def _llama4() -> tuple[str, Any, Any, str]:
    import transformers as hf

    names = ("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>")
    marks = [*names, "<|tile_x_separator|>", "<|tile_y_separator|>"]
    tokenizer = make_tokenizer(marks)
    config = hf.Llama4Config(
        vision_config=VISION
        | {
            "image_size": 28,
            "patch_size": 7,
            "intermediate_size": 128,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
            "vision_output_dim": 24,
        },
        text_config=hf.Llama4TextConfig(
            **TEXT,
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            attention_chunk_size=4096,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
    )
    return "Llama4ForConditionalGeneration", config, Llama4Stand(tokenizer), "<|image|>"


class Llama4Stand(Stand):
    """Processor of Llama 4: an independent implementation that gets the pixels from our processor."""

    settings = {"max_patches": 4}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        states = model.get_image_features(**inputs).last_hidden_state
        return torch.as_tensor(model.multi_modal_projector(states.flatten(0, 1)))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        tiles = [finished(self.ours.process("image", image, {}).arrays)["pixels"] for image in images]
        parts = text.split("<|image|>")
        out = parts[0]
        for image, image_tiles, part in zip(images, tiles, parts[1:], strict=True):
            rows, columns = LLAMA4_GRIDS[image.size]
            assert len(image_tiles) == rows * columns + (rows * columns > 1)
            spelled = "<|image_start|>"
            for _ in range(rows if len(image_tiles) > 1 else 0):
                spelled += "<|tile_x_separator|>".join(["<|patch|>" * 4] * columns) + "<|tile_y_separator|>"
            out += spelled + "<|image|>" + "<|patch|>" * 4 + "<|image_end|>" + part
        inputs = self.tokenizer(out, return_tensors="pt")
        return inputs | {"pixel_values": torch.cat(tiles)}


LLAMA4_GRIDS = {
    (40, 20): (1, 2),
    (28, 28): (1, 1),
    (90, 61): (2, 2),
    (17, 19): (1, 1),
    (64, 24): (1, 3),
    (20, 60): (3, 1),
    (120, 90): (2, 2),
}
"""Rows and columns of tiles of 28 pixels, four at most, by width and height of an image, as transformers
5.22 chooses them."""


FAMILIES = {
    "llava": _llava,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "qianfan_ocr": _qianfan_ocr,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "lighton_ocr": _lighton_ocr,
    "aya_vision": _aya_vision,
    "llama4": _llama4,
    "idefics3": _idefics3,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next_video,
    "granite_vision": _granite_vision,
    "llava_onevision": _llava_onevision,
    **MORE,
    **PHI4,
    **LATEST,
    **GEMMA4,
    **DEEPSEEK,
    **DEEPSEEK2,
}
