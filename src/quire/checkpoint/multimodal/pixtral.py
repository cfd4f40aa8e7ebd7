"""Pixtral, Mistral 3 and LightOnOCR: images of any size, with 2-D rope in the vision encoder."""

from dataclasses import dataclass, replace

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, rope_theta, side_of, stack_weights, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PixtralFacts:
    """A vision encoder with 2-D rope, and its projector."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    patch: int
    """Patch side in pixels."""
    image: int
    """Longest image side in pixels."""
    theta: float
    activation: str
    merge: int
    """Side of the square of patches that are merged into one token."""
    is_merged: bool
    """Whether a norm and a merging layer precede the projector."""
    norm_eps: float
    """Epsilon of the norm before the merging layer."""
    size_out: int
    image_id: int
    """Placeholder token of an image."""
    projector_activation: str
    bias: bool
    breaks: bool = True
    """Whether a token ends each row of patches."""
    names: tuple[str, str] = ("vision_tower", "multi_modal_projector")
    """Tensor names of the encoder and the projector in checkpoints."""

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return (
            stack_weights(self.layers, self.hidden, self.intermediate, 3)
            + self.hidden * (3 * self.patch**2 + self.is_merged * self.merge**2 * self.hidden)
            + self.size_out * (self.hidden + self.size_out)
        )


def pixtral(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read Pixtral, a LLaVA checkpoint with a vision encoder of the type pixtral."""
    text = text_part(keys, default="mistral")
    facts = _read_facts(
        keys, text, merge=1, is_merged=False, bias=keys.flag("multimodal_projector_bias", True)
    )
    return text, MediaFacts("pixtral", ("image",), facts)


def mistral3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="mistral")
    merge, bias = keys.size("spatial_merge_size", 2), keys.flag("multimodal_projector_bias")
    facts = _read_facts(keys, text, merge=merge, is_merged=True, bias=bias)
    return text, MediaFacts("pixtral", ("image",), facts)


def lighton_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read LightOnOCR: Mistral 3's encoder with a Qwen 3 decoder, and no row-end tokens."""
    text = text_part(keys, default="qwen3")
    facts = _read_facts(keys, text, merge=keys.size("spatial_merge_size", 2), is_merged=True, bias=False)
    facts = replace(facts, breaks=False, names=("vision_encoder", "vision_projection"))
    return text, MediaFacts("lighton_ocr", ("image",), facts)


def _read_facts(
    keys: ConfigReader, text: ConfigReader, *, merge: int, is_merged: bool, bias: bool
) -> PixtralFacts:
    vision = part(keys, "vision_config")
    if keys.get("vision_feature_layer") not in (None, -1):
        raise keys.wrong("vision_feature_layer", "-1, the states after all layers")
    hidden, heads = vision.size("hidden_size", 1024), vision.size("num_attention_heads", 16)
    facts = PixtralFacts(
        layers=vision.size("num_hidden_layers", 24),
        hidden=hidden,
        intermediate=vision.size("intermediate_size", 4096),
        heads=heads,
        head_dim=hidden // heads,
        patch=side_of(vision, "patch_size", 16),
        image=side_of(vision, "image_size", 1024),
        theta=rope_theta(vision),
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
        raise ConfigError(f"{vision.source}: heads of size {facts.head_dim} do not fit 2-D rope")
    return facts
