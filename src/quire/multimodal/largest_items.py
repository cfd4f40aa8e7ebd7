"""The largest items that an engine reckons with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.config.mm_limits import limits_of
from quire.config.sections import MultimodalSection
from quire.errors import ConfigError
from quire.multimodal.processors import PROCESSORS, Content, Foresees, Processor, Sound, Video
from quire.text.tokenizer import Tokenizer

_SIZES = {"image": ("width", "height"), "video": ("num_frames", "width", "height"), "audio": ("length",)}
"""What limit_mm_per_prompt calls them, in the order of `Processor.largest`."""
_RATE = 16000


def largest_items(
    path: Path, media: MediaFacts, section: MultimodalSection, tokenizer: Tokenizer | None, longest: int
) -> dict[str, int]:
    """By modality that prompts may have: the vectors of the largest, at most as many as the `longest` prompt
    has tokens. Without a tokenizer nobody knows better. Those that no tokens stand for are all alike."""
    limits = limits_of(section.limit_mm_per_prompt, language_model_only=section.language_model_only)
    names = [name for name in media.modalities if limits[name]]
    if media.crossed:
        return dict.fromkeys(names, media.crossed)
    if tokenizer is None:
        return dict.fromkeys(names, longest)
    processor: Processor = PROCESSORS[media.family](path, media, tokenizer)
    return {name: min(_num_vectors(processor, name, section), longest) for name in names}


def _num_vectors(processor: Processor, modality: str, section: MultimodalSection) -> int:
    """As the processor says, unless settings say how large items are, or how they are read: then one of that
    size is processed. Of a video it is only foretold, or else taken as it says: the largest takes long."""
    asked = section.limit_mm_per_prompt.get(modality)
    sizes = asked if isinstance(asked, dict) and asked.keys() - {"count"} else {}
    if not sizes and (modality == "audio" or not section.mm_processor_kwargs):
        return processor.most_vectors(modality)
    size = _size(modality, sizes, processor.largest(modality))
    if modality == "video" and isinstance(processor, Foresees):
        return processor.num_vectors(Video.black(*size), section.mm_processor_kwargs)
    if modality == "video" and not sizes:
        return processor.most_vectors(modality)
    blank = _blank(modality, size)
    made = processor.process(modality, blank, section.mm_processor_kwargs)
    return sum(count for _, count in made.runs) if made.runs else len(made.token_ids)


def _size(modality: str, sizes: Mapping[str, Any], largest: tuple[int, ...]) -> list[int]:
    names = _SIZES[modality]
    for name, size in sizes.items():
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if name != "count" and (name not in names or not is_size):
            raise ConfigError(
                f"limit_mm_per_prompt.{modality} has no {name}={size!r}; it takes count and the sizes "
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
            return Sound(np.zeros(size[0], np.float32), _RATE)
