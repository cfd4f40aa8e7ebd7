"""LLaVA: hidden states of a vision encoder, projected by two linear layers."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, text_part, token_id, vit
from quire.checkpoint.multimodal.pixtral import pixtral
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class LlavaFacts(TowerFacts):
    """A vision encoder and its projector."""

    depths: tuple[int, ...]
    """Layers after which hidden states are taken; those of several layers are concatenated."""
    first: int
    """Number of first encoder outputs that are dropped (1: the class token)."""
    activation: str
    bias: bool

    @property
    def tokens(self) -> int:
        return self.vit.tokens - self.first

    @property
    def num_weights(self) -> int:
        return self.vit.num_weights(max(self.depths)) + self.size_out * (
            len(self.depths) * self.vit.hidden + self.size_out
        )


def llava(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    if part(keys, "vision_config").get("model_type") == "pixtral":
        return pixtral(keys)
    text = text_part(keys)
    return text, MediaFacts("llava", ("image",), read_llava(keys, text))


def read_llava(
    keys: ConfigReader,
    text: ConfigReader,
    tower: str = "clip_vision_model",
    layer: int = -2,
    select: str = "default",
) -> LlavaFacts:
    """Read the keys that all LLaVA models share. `tower`, `layer` and `select` are defaults: the encoder's
    model_type, the layer whose hidden states are taken, and the strategy that selects among them."""
    facts = vit(part(keys, "vision_config"), tower)
    layers = keys.get("vision_feature_layer")
    layers = layer if layers is None else layers
    layers = [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list) or not all(-facts.layers - 1 <= i <= facts.layers for i in layers):
        raise keys.wrong("vision_feature_layer", f"layers of the {facts.layers} that there are")
    select = keys.get("vision_feature_select_strategy") or select
    if select not in ("default", "full"):
        raise keys.wrong("vision_feature_select_strategy", "'default' or 'full'")
    return LlavaFacts(
        vit=facts,
        depths=tuple(i % (facts.layers + 1) for i in layers),
        first=int(select == "default"),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_index", "image_token_id", default=32000),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=keys.flag("multimodal_projector_bias", True),
    )
