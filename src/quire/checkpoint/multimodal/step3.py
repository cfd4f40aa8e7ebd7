"""Step3-VL and Step-3.7: a perception encoder over an image and its windows, in front of a decoder."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import ViTFacts, part, side_of, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A tower, and the product behind it."""

    vit: ViTFacts
    """Of the image as a whole."""
    first_norm: bool
    """Whether there is a norm before all layers,"""
    last_norm: bool
    """and one behind them."""
    scales: bool
    """Whether what a layer adds is scaled number by number."""
    size_out: int
    image_id: int
    """The token in whose places an image's vectors stand."""
    bias: bool
    """Of the product."""

    def tokens(self, side: int) -> int:
        """Vectors of a square of so many pixels a side: patches are halved twice."""
        patches = side // self.vit.patch
        return (-(-patches // 4)) ** 2

    @property
    def num_weights(self) -> int:
        """About."""
        return self.vit.num_weights() + ((18 + 72) * self.vit.hidden**2 + 4 * self.vit.hidden * self.size_out)


def step_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    return _read(keys, text_part(keys, default="qwen3"))


def step37(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    return _read(keys, text_part(keys, default="step3p5"))


_NAMES = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
"""What transformers calls it, and what StepFun does."""


def _read(keys: ConfigReader, text: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    vision = part(keys, "vision_config")
    vision = vision.but(**{own: vision.get(own) or vision.get(other) for other, own in _NAMES.items()})
    hidden = vision.size("width", 1536)
    vit = ViTFacts(
        layers=vision.size("layers", 47),
        hidden=hidden,
        intermediate=int(hidden * vision.number("mlp_ratio", 8960 / 1536)),
        heads=vision.size("heads", 16),
        image=side_of(vision, "image_size", 728),
        patch=side_of(vision, "patch_size", 14),
        activation=vision.get("hidden_act") or "quick_gelu",
        norm_eps=vision.number("layer_norm_eps", 1e-5),
    )
    if vision.flag("use_cls_token") or not vision.flag("use_rope2d", True):
        raise ConfigError(
            f"{vision.source}: towers with use_cls_token or without use_rope2d are not supported"
        )
    facts = StepFacts(
        vit=vit,
        first_norm=vision.flag("use_ln_pre", True),
        last_norm=vision.flag("use_ln_post"),
        scales="ls_init_value" not in vision.values or vision.get("ls_init_value") is not None,
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id", default=151679),
        bias=keys.flag("projector_bias"),
    )
    return text, MediaFacts("step_vl", ("image",), facts)
