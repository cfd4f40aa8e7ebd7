"""Aya Vision and Command A Vision: SigLIP over image tiles, pixel shuffle, a gated projector, Cohere 2."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ShuffledFacts, part, text_part, token_id, vit
from quire.checkpoint.multimodal.llava import read_llava
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AyaFacts(ShuffledFacts):
    """SigLIP and its projector."""

    depths: tuple[int, ...]
    """Layers after which hidden states are taken; states of several layers are concatenated. Empty: states
    after all layers and the final norm."""
    first: int
    """Number of first encoder outputs that are dropped (1: the class token)."""
    norm_eps: float
    """Epsilon of the norm before the projector; 0: no norm."""
    intermediate: int
    """Intermediate size of the projector; half of the intermediate values are gates."""

    @property
    def size_in(self) -> int:
        return self.gather**2 * self.vit.hidden * max(1, len(self.depths))

    @property
    def num_weights(self) -> int:
        depth = max(self.depths, default=self.vit.layers)
        return self.vit.num_weights(depth) + self.intermediate * (self.size_in + self.size_out // 2)


def aya_vision(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="cohere2")
    base = read_llava(keys, text, "siglip_vision_model", layer=-1, select="full")
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
    return text, MediaFacts("aya_vision", ("image",), _check(keys, facts))


def cohere2_vision(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read Command A Vision: the states after all layers and the final norm; no norm before the projector."""
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
    return text, MediaFacts("cohere2_vision", ("image",), _check(keys, facts))


def _image_id(keys: ConfigReader) -> int:
    return token_id(keys, "image_token_index", "image_token_id", default=255036)


def _check(keys: ConfigReader, facts: AyaFacts) -> AyaFacts:
    side = facts.vit.side
    if side % facts.gather or facts.vit.tokens - facts.first != side**2:
        raise ConfigError(f"{keys.source}: {side} patches a side cannot be gathered by {facts.gather}")
    if facts.intermediate % 2:
        raise keys.wrong("alignment_intermediate_size", "an even number, since half of it are gates")
    return facts
