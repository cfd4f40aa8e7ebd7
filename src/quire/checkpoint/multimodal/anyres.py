"""LLaVA-Next, its Video model and LLaVA-OneVision: an image as a whole, and in tiles of one of several grid
shapes."""

from dataclasses import asdict, dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import text_part, token_id
from quire.checkpoint.multimodal.llava import LlavaFacts, read_llava
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class AnyresFacts(LlavaFacts):
    """The encoder of a LLaVA model that splits an image into tiles."""

    shapes: tuple[tuple[int, int], ...] = ()
    """Possible sizes of the area that all tiles of an image cover, as heights and widths in pixels."""
    most_tiles: int = 0
    """Largest area of an image in tiles: features of a larger image are interpolated to fewer tokens; 0: no
    limit."""
    video_id: int | None = None


_NEXT_SHAPES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def llava_next(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys)
    facts = AnyresFacts(**_llava_fields(read_llava(keys, text)), shapes=_read_shapes(keys, _NEXT_SHAPES))
    return text, MediaFacts("llava_next", ("image",), facts)


def llava_next_video(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read LLaVA-Next-Video, which averages squares of 2 x 2 patches of each frame."""
    keys.require("spatial_pool_mode", "average")
    keys.require("spatial_pool_stride", 2)
    text = text_part(keys)
    image_id = token_id(keys, "image_token_index", "image_token_id", default=32001)
    facts = AnyresFacts(
        **_llava_fields(read_llava(keys, text), image_id=image_id),
        shapes=_read_shapes(keys, _NEXT_SHAPES),
        video_id=token_id(keys, "video_token_index", "video_token_id", default=32000),
    )
    if facts.vit.side % 2:
        raise keys.wrong("vision_config", "an encoder with an even number of patches per side")
    return text, MediaFacts("llava_next_video", ("image", "video"), facts)


def llava_onevision(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="qwen2")
    sides = range(384, 2305, 384)
    max_tiles = str(keys.get("vision_aspect_ratio") or "anyres_max_9").removeprefix("anyres_max_")
    if not max_tiles.isdigit():
        raise keys.wrong("vision_aspect_ratio", "'anyres_max_' and a number")
    base = read_llava(keys, text, "siglip_vision_model", layer=-1, select="full")
    facts = AnyresFacts(
        **_llava_fields(base, image_id=token_id(keys, "image_token_index", "image_token_id", default=151646)),
        shapes=_read_shapes(keys, tuple((high, wide) for high in sides for wide in sides)),
        most_tiles=int(max_tiles),
        video_id=token_id(keys, "video_token_index", "video_token_id", default=151647),
    )
    return text, MediaFacts("llava_onevision", ("image", "video"), facts)


def _llava_fields(facts: LlavaFacts, **changes: int) -> dict[str, Any]:
    return asdict(facts) | {"vit": facts.vit} | changes


def _read_shapes(keys: ConfigReader, default: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    shapes = keys.get("image_grid_pinpoints")
    shapes = default if shapes is None else shapes
    if not isinstance(shapes, (list, tuple)) or not all(
        isinstance(shape, (list, tuple)) and len(shape) == 2 for shape in shapes
    ):
        raise keys.wrong("image_grid_pinpoints", "a list of heights and widths")
    return tuple((int(height), int(width)) for height, width in shapes)
