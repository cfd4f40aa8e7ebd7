"""Pixtral, Mistral 3 and LightOnOCR: images of any size, whose patches turn by row and column."""

from dataclasses import dataclass, replace

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import part, side_of, stack_weights, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PixtralFacts:
    """A tower whose heads turn by two axes, and the projector behind it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    patch: int
    """Pixels of a patch's side."""
    image: int
    """Pixels of the longest side of an image."""
    theta: float
    activation: str
    merge: int
    """One vector is made of a square of patches with this side."""
    is_merged: bool
    """Whether a norm and a product come before the projector."""
    norm_eps: float
    """Of that norm."""
    size_out: int
    image_id: int
    """The token in whose places an image's vectors stand."""
    projector_activation: str
    bias: bool
    breaks: bool = True
    """Whether a token ends each row."""
    names: tuple[str, str] = ("vision_tower", "multi_modal_projector")
    """Of the tower and of the projector in checkpoints."""

    @property
    def num_weights(self) -> int:
        """About."""
        return (
            stack_weights(self.layers, self.hidden, self.intermediate, 3)
            + self.hidden * (3 * self.patch**2 + self.is_merged * self.merge**2 * self.hidden)
            + self.size_out * (self.hidden + self.size_out)
        )


def pixtral(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """As a LLaVA with this tower."""
    text = text_part(keys, default="mistral")
    facts = _facts(keys, text, merge=1, is_merged=False, bias=keys.flag("multimodal_projector_bias", True))
    return text, MediaFacts("pixtral", ("image",), facts)


def mistral3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="mistral")
    merge, bias = keys.size("spatial_merge_size", 2), keys.flag("multimodal_projector_bias")
    facts = _facts(keys, text, merge=merge, is_merged=True, bias=bias)
    return text, MediaFacts("pixtral", ("image",), facts)


def lighton_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Mistral 3's with Qwen3's decoder, whose rows nothing ends."""
    text = text_part(keys, default="qwen3")
    facts = _facts(keys, text, merge=keys.size("spatial_merge_size", 2), is_merged=True, bias=False)
    facts = replace(facts, breaks=False, names=("vision_encoder", "vision_projection"))
    return text, MediaFacts("lighton_ocr", ("image",), facts)


def _facts(
    keys: ConfigReader, text: ConfigReader, *, merge: int, is_merged: bool, bias: bool
) -> PixtralFacts:
    vision = part(keys, "vision_config")
    if keys.get("vision_feature_layer") not in (None, -1):
        raise keys.wrong("vision_feature_layer", "-1, the states behind all layers")
    hidden, heads = vision.size("hidden_size", 1024), vision.size("num_attention_heads", 16)
    rope = vision.get("rope_parameters")
    turning = ConfigReader(vision.source, rope) if isinstance(rope, dict) else vision
    facts = PixtralFacts(
        layers=vision.size("num_hidden_layers", 24),
        hidden=hidden,
        intermediate=vision.size("intermediate_size", 4096),
        heads=heads,
        head_dim=hidden // heads,
        patch=side_of(vision, "patch_size", 16),
        image=side_of(vision, "image_size", 1024),
        theta=turning.number("rope_theta", 10000.0),
        activation=vision.get("hidden_act") or "gelu",
        merge=merge,
        is_merged=is_merged,
        norm_eps=text.number("rms_norm_eps", 1e-5),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=10),
        projector_activation=keys.get("projector_hidden_act") or "gelu",
        bias=bias,
    )
    if facts.head_dim % 4:
        raise ConfigError(f"{vision.source}: heads of {facts.head_dim} do not turn by two axes")
    return facts
