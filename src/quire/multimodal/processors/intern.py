"""InternVL: an image in the grid of tiles that is nearest to its shape, and the whole image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.intern import InternFacts
from quire.checkpoint.reader import ConfigReader
from quire.multimodal.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MAX_FRAMES,
    PixelScaling,
    check_frames,
    video_settings,
)
from quire.multimodal.processors import ProcessedItem, Video
from quire.multimodal.processors.image_base import token_of
from quire.multimodal.processors.tiling import TiledProcessor
from quire.text.tokenizer import Tokenizer

_BEGIN, _PLACE, _END, _VIDEO = "<img>", "<IMG_CONTEXT>", "</img>", "<video>"


class InternVLProcessor(TiledProcessor):
    """Processor of InternVL. The placeholder in prompts is the image token; `<image>`, that of the original
    code, is not a token."""

    mean, std = IMAGENET_MEAN, IMAGENET_STD
    older_arguments = {
        "min_dynamic_patch": "min_patches",
        "max_dynamic_patch": "max_patches",
        "dynamic_image_size": "crop_to_patches",
    }
    arguments = (*TiledProcessor.arguments, *older_arguments)
    facts: InternFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.begin, image_id, self.end = (token_of(tokenizer, token) for token in (_BEGIN, _PLACE, _END))
        super().__init__(path, facts, tokenizer, image_id=image_id)
        self.video = token_of(tokenizer, _VIDEO) if "video" in facts.modalities else self.mark
        most = self.settings.size("max_patches", self.facts.most_tiles)
        self.settings = self.settings.but(crop_to_patches=self.facts.is_tiled, max_patches=most)
        self.video_settings = video_settings(path, self.settings)

    def marks(self, modality: str) -> list[int]:
        return [self.video if modality == "video" else self.mark]

    def text(self, modality: str, number: int) -> str:
        return _VIDEO if modality == "video" else _PLACE

    def rewrite_text(self, text: str) -> str:
        is_token = self.tokenizer.backend.token_to_id("<image>") is not None
        return text if is_token else text.replace("<image>", _PLACE)

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        check_frames(len(video.frames))
        return len(video.frames) * self.facts.tokens

    def process_video(self, video: Video, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        check_frames(len(video.frames))
        frames = self.resize_frames(video, keys)
        text = "\n".join(f"Frame{i + 1}: {_BEGIN}{_PLACE}{_END}" for i in range(len(frames)))
        return self.build_item(self.expand(text), arrays=scaling(frames))

    def span(self, num_tiles: int) -> list[int]:
        return [self.begin, *[self.image_id] * (self.facts.tokens * num_tiles), self.end]

    def max_vectors(self, modality: str) -> int:
        if modality == "video":
            return MAX_FRAMES * self.facts.tokens
        return super().max_vectors(modality)

    def largest(self, modality: str) -> tuple[int, ...]:
        if modality == "video":
            return MAX_FRAMES, self.facts.vit.image, self.facts.vit.image
        return super().largest(modality)
