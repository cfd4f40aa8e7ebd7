"""Idefics 3 and SmolVLM: SigLIP over image tiles, and pixel shuffle of the patches."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import ViTFacts, part, side_of, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IdeficsFacts:
    """A vision encoder and its projection."""

    vit: ViTFacts
    gather: int
    """Side of the square of patches that pixel shuffle merges into one token."""
    size_out: int
    image_id: int
    """Placeholder token of an image."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a tile."""
        return (self.vit.side // self.gather) ** 2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return self.vit.num_weights() + self.gather**2 * self.vit.hidden * self.size_out


def idefics3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys)
    vision = part(keys, "vision_config")
    vit = ViTFacts(
        layers=vision.size("num_hidden_layers", 12),
        hidden=vision.size("hidden_size", 1152),
        intermediate=vision.size("intermediate_size", 3072),
        heads=vision.size("num_attention_heads", 16),
        image=side_of(vision, "image_size", 224),
        patch=side_of(vision, "patch_size", 32),
        activation=vision.get("hidden_act") or "gelu_pytorch_tanh",
        norm_eps=vision.number("layer_norm_eps", 1e-6),
    )
    gather = keys.size("scale_factor", 2)
    if vit.side % gather:
        raise ConfigError(f"{keys.source}: {vit.side} patches a side cannot be gathered by {gather}")
    image_id = token_id(keys, "image_token_id", default=128257)
    facts = IdeficsFacts(vit, gather, text.size("hidden_size"), image_id)
    return text, MediaFacts("idefics3", ("image",), facts)
