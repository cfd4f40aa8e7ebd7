"""CLIP and SigLIP: a text encoder and a vision encoder with embeddings in one space."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, text_part, vit
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_GEMMA_VOCAB = 256000
"""Vocabulary size of SigLIP 2, which has the tokenizer of Gemma with padding token 0."""


@dataclass(frozen=True, slots=True)
class DualFacts(TowerFacts):
    """A vision encoder with one embedding of the image as its output."""

    @property
    def tokens(self) -> int:
        return 1

    @property
    def num_weights(self) -> int:
        vit = self.vit
        pooling = vit.hidden * (4 * vit.hidden + 2 * vit.intermediate)
        return vit.num_weights() + (vit.hidden * self.size_out if vit.has_class else pooling)


def clip(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    size = keys.size("projection_dim", 512)
    text = text_part(keys, default="clip_text_model").but(projection_size=size)
    facts = DualFacts(vit(part(keys, "vision_config"), "clip_vision_model"), size, image_id=0)
    return text, MediaFacts("clip", ("image",), facts)


def siglip(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read SigLIP. Texts are padded to the full length, as in training."""
    text, vision = text_part(keys, default="siglip_text_model"), part(keys, "vision_config")
    if not vision.flag("vision_use_head", True):
        raise vision.wrong("vision_use_head", "true: without this head an image has no embedding")
    padding = 0 if text.get("vocab_size") == _GEMMA_VOCAB else 1
    padding = padding if text.get("pad_token_id") is None else text.token_ids("pad_token_id")[0]
    facts = vit(vision, "siglip_vision_model")
    size = text.size("projection_size", text.size("hidden_size", 768))
    if size != facts.hidden:
        raise ConfigError(
            f"{keys.source}: texts have embeddings of size {size}, and images of size {facts.hidden}"
        )
    text = text.but(projection_size=size, pad_token_id=padding)
    return text, MediaFacts("siglip", ("image",), DualFacts(facts, size, image_id=0))
