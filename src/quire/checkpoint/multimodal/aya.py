"""Aya Vision and Command A Vision: tiles of an image through SigLIP, patches gathered, a gate, Cohere 2."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.llava import projected
from quire.checkpoint.multimodal.parts import ViTFacts, part, text_part, token_id, vit
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AyaFacts:
    """SigLIP, and the projector behind it."""

    vit: ViTFacts
    depths: tuple[int, ...]
    """Behind how many layers states are taken, side by side; none: behind the norm behind all of them."""
    first: int
    """How many vectors of the tower are left out, from its first on."""
    gather: int
    """The side of the squares of patches that one vector is made of."""
    norm_eps: float
    """Of the norm before the projector; 0: there is none."""
    intermediate: int
    """Numbers between its products, half of which are the gates of the others."""
    size_out: int
    image_id: int
    """The token in whose places an image's vectors stand."""

    @property
    def size_in(self) -> int:
        return self.gather**2 * self.vit.hidden * max(1, len(self.depths))

    @property
    def tokens(self) -> int:
        """Vectors of a tile."""
        return (self.vit.side // self.gather) ** 2

    @property
    def num_weights(self) -> int:
        """About."""
        depth = max(self.depths, default=self.vit.layers)
        return self.vit.num_weights(depth) + self.intermediate * (self.size_in + self.size_out // 2)


def aya_vision(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="cohere2")
    base = projected(keys, text, "siglip_vision_model", layer=-1, select="full")
    facts = AyaFacts(
        vit=base.vit,
        depths=base.depths,
        first=base.first,
        gather=keys.size("downsample_factor", 2),
        norm_eps=keys.number("adapter_layer_norm_eps", 1e-6),
        intermediate=keys.size("alignment_intermediate_size", text.size("hidden_size")),
        size_out=text.size("hidden_size"),
        image_id=_image_id(keys),
    )
    return text, MediaFacts("aya_vision", ("image",), _checked(keys, facts))


def cohere2_vision(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Command A Vision's: the states behind all layers and their norm, and none before the projector."""
    text = text_part(keys, default="cohere2")
    facts = AyaFacts(
        vit=vit(part(keys, "vision_config"), "siglip_vision_model"),
        depths=(),
        first=0,
        gather=keys.size("downsample_factor", 2),
        norm_eps=0.0,
        intermediate=keys.size("alignment_intermediate_size", 36864),
        size_out=text.size("hidden_size"),
        image_id=_image_id(keys),
    )
    return text, MediaFacts("cohere2_vision", ("image",), _checked(keys, facts))


def _image_id(keys: ConfigReader) -> int:
    return token_id(keys, "image_token_index", "image_token_id", default=255036)


def _checked(keys: ConfigReader, facts: AyaFacts) -> AyaFacts:
    side = facts.vit.side
    if side % facts.gather or facts.vit.tokens - facts.first != side**2:
        raise ConfigError(f"{keys.source}: {side} patches a side cannot be gathered by {facts.gather}")
    if facts.intermediate % 2:
        raise keys.wrong("alignment_intermediate_size", "an even number: half of it are gates")
    return facts
