"""LLaVA-Next and LLaVA-OneVision: an image as a whole, and in tiles of one of several shapes."""

from dataclasses import asdict, dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.llava import LlavaFacts, projected
from quire.checkpoint.multimodal.parts import text_part, token_id
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class AnyresFacts(LlavaFacts):
    """A LLaVA whose images have several tiles."""

    shapes: tuple[tuple[int, int], ...] = ()
    """Height and width of what tiles may make up together, in pixels."""
    most_tiles: int = 0
    """Vectors beyond those of so many tiles are averaged; 0: there is no limit."""
    video_id: int | None = None


def llava_next(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys)
    shapes = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    facts = AnyresFacts(**_plain(projected(keys, text)), shapes=_shapes(keys, shapes))
    return text, MediaFacts("llava_next", ("image",), facts)


def llava_onevision(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="qwen2")
    sides = range(384, 2305, 384)
    most = str(keys.get("vision_aspect_ratio") or "anyres_max_9").removeprefix("anyres_max_")
    if not most.isdigit():
        raise keys.wrong("vision_aspect_ratio", "'anyres_max_' and a number")
    base = projected(keys, text, "siglip_vision_model", layer=-1, select="full")
    facts = AnyresFacts(
        **_plain(base, image_id=token_id(keys, "image_token_index", "image_token_id", default=151646)),
        shapes=_shapes(keys, tuple((high, wide) for high in sides for wide in sides)),
        most_tiles=int(most),
        video_id=token_id(keys, "video_token_index", "video_token_id", default=151647),
    )
    return text, MediaFacts("llava_onevision", ("image", "video"), facts)


def _plain(facts: LlavaFacts, **changes: int) -> dict[str, Any]:
    return asdict(facts) | {"vit": facts.vit} | changes


def _shapes(keys: ConfigReader, default: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    found = keys.get("image_grid_pinpoints")
    found = default if found is None else found
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in found
    ):
        raise keys.wrong("image_grid_pinpoints", "a list of heights and widths")
    return tuple((int(high), int(wide)) for high, wide in found)
