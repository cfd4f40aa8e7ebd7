"""Llama 4: tiles of an image, whose patches turn by column and row, gathered four by four."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import ViTFacts, part, side_of, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Llama4Facts:
    """A tower, its adapter, and the projector behind that."""

    vit: ViTFacts
    theta: float
    gather: int
    """The side of the squares of patches that one vector is made of."""
    inner: int
    """Numbers of a vector within the adapter,"""
    adapted: int
    """and behind it."""
    size_out: int
    image_id: int
    """The token in whose places an image's vectors stand."""

    @property
    def tokens(self) -> int:
        """Vectors of a tile."""
        return (self.vit.side // self.gather) ** 2

    @property
    def num_weights(self) -> int:
        """About."""
        return self.vit.num_weights() + (
            self.gather**2 * self.vit.hidden * self.inner + self.adapted * (self.inner + self.size_out)
        )


def llama4(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="llama4_text")
    vision = part(keys, "vision_config")
    vit = ViTFacts(
        layers=vision.size("num_hidden_layers", 34),
        hidden=vision.size("hidden_size", 768),
        intermediate=vision.size("intermediate_size", 5632),
        heads=vision.size("num_attention_heads", 16),
        image=side_of(vision, "image_size", 448),
        patch=side_of(vision, "patch_size", 14),
        activation="gelu",
        norm_eps=1e-5,
        has_class=True,
    )
    gather = round(1 / vision.number("pixel_shuffle_ratio", 0.5))
    if vit.side % gather or vit.hidden // vit.heads % 4:
        raise ConfigError(f"{vision.source}: {vit.side} patches a side and {vit.heads} heads do not fit")
    rope = vision.get("rope_parameters")
    turning = ConfigReader(vision.source, rope) if isinstance(rope, dict) else vision
    facts = Llama4Facts(
        vit=vit,
        theta=turning.number("rope_theta", 10000.0),
        gather=gather,
        inner=vision.size("projector_input_dim", 4096),
        adapted=vision.size("projector_output_dim", 4096),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=200092),
    )
    return text, MediaFacts("llama4", ("image",), facts)
