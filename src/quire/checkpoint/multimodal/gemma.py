"""Gemma 3: an image is 256 soft tokens, which attend to each other in both directions."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, text_part, token_id, vit
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GemmaFacts(TowerFacts):
    """SigLIP, and the number of soft tokens that its patches are averaged to."""

    side: int
    """Number of soft tokens per image side."""
    begin_id: int
    end_id: int

    @property
    def tokens(self) -> int:
        return self.side**2


def gemma3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="gemma3_text")
    facts = vit(part(keys, "vision_config"), "siglip_vision_model")
    side = int(keys.size("mm_tokens_per_image", 256) ** 0.5)
    if side**2 != keys.size("mm_tokens_per_image", 256) or facts.side % side:
        raise ConfigError(f"{keys.source}: mm_tokens_per_image is no square of {facts.side} patches a side")
    tower = GemmaFacts(
        vit=facts,
        side=side,
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=262144),
        begin_id=token_id(keys, "boi_token_index", "boi_token_id", default=255999),
        end_id=token_id(keys, "eoi_token_index", "eoi_token_id", default=256000),
    )
    return text, MediaFacts("gemma3", ("image",), tower, is_whole=True)
