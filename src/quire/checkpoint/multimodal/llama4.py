"""Llama 4: a vision encoder with 2-D rope over image tiles, and pixel shuffle of the patches."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ShuffledFacts, part, read_vit, rope_theta, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Llama4Facts(ShuffledFacts):
    """A vision encoder, its adapter (two linear layers after pixel shuffle), and the projector to the
    decoder."""

    theta: float
    inner: int
    """Intermediate size of the adapter."""
    adapted: int
    """Output size of the adapter."""

    @property
    def num_weights(self) -> int:
        return self.vit.num_weights() + (
            self.gather**2 * self.vit.hidden * self.inner + self.adapted * (self.inner + self.size_out)
        )


def llama4(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="llama4_text")
    vision = part(keys, "vision_config")
    sizes: dict[str, Any] = {"layers": 34, "intermediate": 5632, "heads": 16, "image": 448, "patch": 14}
    same = vision.but(hidden_act="gelu", layer_norm_eps=1e-5)  # not configurable
    vit = read_vit(same, **sizes, has_class=True)
    gather = round(1 / vision.number("pixel_shuffle_ratio", 0.5))
    if vit.side % gather or vit.hidden // vit.heads % 4:
        raise ConfigError(f"{vision.source}: {vit.side} patches a side and {vit.heads} heads do not fit")
    facts = Llama4Facts(
        vit=vit,
        theta=rope_theta(vision),
        gather=gather,
        inner=vision.size("projector_input_dim", 4096),
        adapted=vision.size("projector_output_dim", 4096),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=200092),
    )
    return text, MediaFacts("llama4", ("image",), facts)
