"""Sizes of the largest images, videos and audio for which an engine reserves memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.config.mm_limits import limits_of
from quire.config.sections import MultimodalSection
from quire.errors import ConfigError
from quire.multimodal.processors import PROCESSORS, Audio, Content, CountsVideoVectors, Processor, Video
from quire.text.tokenizer import Tokenizer

_SIZES = {"image": ("width", "height"), "video": ("num_frames", "width", "height"), "audio": ("length",)}
"""Names of size limits in limit_mm_per_prompt, in the order of the sizes that `Processor.largest` returns."""
_RATE = 16000


def largest_items(
    path: Path, media: MediaFacts, section: MultimodalSection, tokenizer: Tokenizer | None, longest: int
) -> dict[str, int]:
    """Return by modality the number of embeddings of the largest possible item, for which the engine reserves
    memory. The number is at most `longest`, the maximum number of prompt tokens; without a tokenizer it is
    `longest`. Models that cross-attend to an item, such as Whisper, have a fixed number."""
    limits = limits_of(section.limit_mm_per_prompt, language_model_only=section.language_model_only)
    names = [name for name in media.modalities if limits[name]]
    if media.num_cross_states:
        return dict.fromkeys(names, media.num_cross_states)
    if tokenizer is None:
        return dict.fromkeys(names, longest)
    processor: Processor = PROCESSORS[media.family](path, media, tokenizer)
    return {name: min(_num_vectors(processor, name, section), longest) for name in names}


def _num_vectors(processor: Processor, modality: str, section: MultimodalSection) -> int:
    """Return the number of embeddings of the largest possible item of a modality. It is the processor's
    maximum, unless settings limit the size or change processing: then a blank item is processed.

    The embeddings of a video are counted without processing, which would take long for the largest video."""
    limit = section.limit_mm_per_prompt.get(modality)
    sizes = limit if isinstance(limit, dict) and limit.keys() - {"count"} else {}
    if not sizes and (modality == "audio" or not section.mm_processor_kwargs):
        return processor.max_vectors(modality)
    size = _size(modality, sizes, processor.largest(modality))
    if modality == "video" and isinstance(processor, CountsVideoVectors):
        return processor.num_vectors(Video.black(*size), section.mm_processor_kwargs)
    if modality == "video" and not sizes:
        return processor.max_vectors(modality)
    blank = _blank(modality, size)
    processed = processor.process(modality, blank, section.mm_processor_kwargs)
    return sum(count for _, count in processed.runs) if processed.runs else len(processed.token_ids)


def _size(modality: str, sizes: Mapping[str, Any], largest: tuple[int, ...]) -> list[int]:
    names = _SIZES[modality]
    for name, size in sizes.items():
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if name != "count" and (name not in names or not is_size):
            raise ConfigError(
                f"limit_mm_per_prompt.{modality} does not accept {name}={size!r}; it takes count, "
                f"{', '.join(names)}"
            )
    return [sizes.get(name, most) for name, most in zip(names, largest, strict=True)]


def _blank(modality: str, size: list[int]) -> Content:
    match modality:
        case "image":
            return Image.new("RGB", (size[0], size[1]))
        case "video":
            return Video.black(*size)
        case _:
            return Audio(np.zeros(size[0], np.float32), _RATE)
