"""Step3, Step3-VL-10B and Step-3.7: a vision encoder over an image and its crops."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ViTFacts, part, read_vit, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A vision encoder and its projection."""

    vit: ViTFacts
    """The vision transformer; its image size is that of the whole image, crops are smaller."""
    first_norm: bool
    """Whether there is a norm before all layers."""
    last_norm: bool
    """Whether there is a norm after all layers."""
    scales: bool
    """Whether the outputs in each layer have learned scales (LayerScale)."""
    size_out: int
    image_id: int
    """Placeholder token of an image."""
    bias: bool
    """Whether the projection has a bias."""

    def tokens(self, side: int) -> int:
        """Return the number of tokens of a square image of `side` pixels; patches are downsampled by 2
        twice."""
        patches = side // self.vit.patch
        return (-(-patches // 4)) ** 2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return self.vit.num_weights() + ((18 + 72) * self.vit.hidden**2 + 4 * self.vit.hidden * self.size_out)


@dataclass(frozen=True, slots=True)
class Step3Facts:
    """The vision encoder of Step3, its two convolutions and its projection."""

    vit: ViTFacts
    """The vision transformer; its image size is that of the whole image, crops are smaller."""
    size_mid: int
    """Output size of the first convolution; the output of the second convolution is twice as large."""
    stride: int
    """Stride of the first convolution."""
    size_out: int
    image_id: int
    """Placeholder token of an image."""
    bias: bool
    """Whether the projection has a bias."""

    def tokens(self, side: int) -> int:
        """Return the number of tokens of a square image of `side` pixels."""
        patches = side // self.vit.patch
        return (-(-((patches - 2) // self.stride + 1) // 2)) ** 2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        projection = 4 * self.vit.hidden + 18 * self.size_mid + 2 * self.size_out
        return self.vit.num_weights() + self.size_mid * projection


def step3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read the first version of Step3, which has its own vision encoder."""
    text, vision = text_part(keys, default="step3_text"), part(keys, "vision_config")
    vit = read_vit(vision, **_STEP3_SIZES, activation="quick_gelu", norm_eps=1e-5, has_class=True)
    facts = Step3Facts(
        vit=vit,
        size_mid=vision.size("output_hidden_size", 4096),
        stride=keys.size("understand_projector_stride", 1),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id", default=128001),
        bias=keys.flag("projector_bias", True),
    )
    return text, MediaFacts("step3", ("image",), facts)


def step_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    return _read(keys, text_part(keys, default="qwen3"))


def step37(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    return _read(keys, text_part(keys, default="step3p5"))


_KEYS = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""Maps StepFun's keys to those of transformers."""
_STEP3_SIZES: dict[str, Any] = {
    "layers": 63,
    "hidden": 1792,
    "intermediate": 3072,
    "heads": 16,
    "image": 728,
    "patch": 14,
}
_SIZES: dict[str, Any] = {"layers": 47, "hidden": 1536, "heads": 16, "image": 728, "patch": 14}


def _read(keys: ConfigReader, text: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    vision = part(keys, "vision_config").renamed(_KEYS)
    hidden = vision.size("hidden_size", _SIZES["hidden"])
    vision = vision.but(intermediate_size=int(hidden * vision.number("mlp_ratio", 8960 / 1536)))
    vit = read_vit(vision, **_SIZES, activation="quick_gelu", norm_eps=1e-5)
    if vision.flag("use_cls_token") or not vision.flag("use_rope2d", True):
        raise ConfigError(
            f"{vision.source}: encoders with use_cls_token or without use_rope2d are not supported"
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
