"""PaliGemma 1 and 2: SigLIP's patches in front of a text; a prompt sees itself in both directions."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import ViTFacts, part, text_part, token_id, vit
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class PaliGemmaFacts:
    """SigLIP, and one product behind it."""

    vit: ViTFacts
    size_out: int
    image_id: int
    """The token in whose places an image's vectors stand; it is the mark, too."""

    @property
    def tokens(self) -> int:
        """Vectors of an image."""
        return self.vit.tokens

    @property
    def num_weights(self) -> int:
        """About."""
        return self.vit.num_weights() + self.vit.hidden * self.size_out


def paligemma(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """On Gemma, or on Gemma 2. That their tokens see ahead is a matter of prompts with images alone."""
    text = text_part(keys, default="gemma").but(use_bidirectional_attention=None)
    tower = PaliGemmaFacts(
        vit=vit(part(keys, "vision_config"), "siglip_vision_model"),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=256000),
    )
    return text, MediaFacts("paligemma", ("image",), tower, is_whole=True, is_prefix=True)
