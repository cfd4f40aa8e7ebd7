"""PaliGemma 1 and 2: SigLIP patches before the text; the prompt attends in both directions."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, text_part, token_id, vit
from quire.checkpoint.reader import ConfigReader


def paligemma(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read PaliGemma, on Gemma or Gemma 2. Only prompts with images attend in both directions. Prompts
    contain the placeholder token where an image belongs."""
    text = text_part(keys, default="gemma").but(use_bidirectional_attention=None)
    tower = TowerFacts(
        vit=vit(part(keys, "vision_config"), "siglip_vision_model"),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=256000),
    )
    return text, MediaFacts("paligemma", ("image",), tower, is_whole=True, is_prefix=True)
