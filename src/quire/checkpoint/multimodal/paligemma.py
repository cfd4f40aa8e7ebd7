"""PaliGemma 1 and 2: SigLIP patches before the text; the prompt attends in both directions."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, text_part, token_id, vit
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class PaliGemmaFacts(TowerFacts):
    """SigLIP and its projection. The placeholder token of an image is also its mark in prompts."""

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return self.vit.num_weights() + self.vit.hidden * self.size_out


def paligemma(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read PaliGemma, on Gemma or Gemma 2. Only prompts with images attend in both directions."""
    text = text_part(keys, default="gemma").but(use_bidirectional_attention=None)
    tower = PaliGemmaFacts(
        vit=vit(part(keys, "vision_config"), "siglip_vision_model"),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=256000),
    )
    return text, MediaFacts("paligemma", ("image",), tower, is_whole=True, is_prefix=True)
