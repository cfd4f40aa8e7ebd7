"""LLaVA: the states of some layer of a tower, through two products, among those of tokens."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import ViTFacts, part, text_part, token_id, vit
from quire.checkpoint.multimodal.pixtral import pixtral
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class LlavaFacts:
    """A tower, and the projector behind it."""

    vit: ViTFacts
    depths: tuple[int, ...]
    """Behind how many layers states are taken; those of several lie side by side."""
    first: int
    """How many vectors of the tower are left out, from its first on."""
    size_out: int
    """Numbers of a vector: the decoder's hidden size."""
    image_id: int
    """The token in whose places an image's vectors stand."""
    activation: str
    bias: bool

    @property
    def tokens(self) -> int:
        """Vectors of an image."""
        return self.vit.tokens - self.first

    @property
    def num_weights(self) -> int:
        """About."""
        return self.vit.num_weights(max(self.depths)) + self.size_out * (
            len(self.depths) * self.vit.hidden + self.size_out
        )


def llava(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    if part(keys, "vision_config").get("model_type") == "pixtral":
        return pixtral(keys)
    text = text_part(keys)
    return text, MediaFacts("llava", ("image",), projected(keys, text))


def projected(
    keys: ConfigReader,
    text: ConfigReader,
    tower: str = "clip_vision_model",
    layer: int = -2,
    select: str = "default",
) -> LlavaFacts:
    """What all of the LLaVAs say; with the family's own tower, layer and selection where they do not."""
    facts = vit(part(keys, "vision_config"), tower)
    layers = keys.get("vision_feature_layer")
    layers = layer if layers is None else layers
    layers = [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list) or not all(-facts.layers - 1 <= each <= facts.layers for each in layers):
        raise keys.wrong("vision_feature_layer", f"layers of the {facts.layers} that there are")
    select = keys.get("vision_feature_select_strategy") or select
    if select not in ("default", "full"):
        raise keys.wrong("vision_feature_select_strategy", "'default' or 'full'")
    return LlavaFacts(
        vit=facts,
        depths=tuple(each % (facts.layers + 1) for each in layers),
        first=int(select == "default"),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=32000),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=keys.flag("multimodal_projector_bias", True),
    )
