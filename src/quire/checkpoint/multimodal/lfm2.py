"""LFM2-VL: SigLIP 2 over an image of any shape, or over its tiles and a thumbnail."""

from dataclasses import dataclass
from math import isqrt

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, read_vit, text_part, token_id
from quire.checkpoint.reader import ConfigReader

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu")


@dataclass(frozen=True, slots=True)
class Lfm2VLFacts(TowerFacts):
    """A vision encoder, and the projector of squares of patches. The image size in `vit` is that of the table
    of positions, which is interpolated for other sizes."""

    merge: int
    """Side of the square of patches that becomes one token."""
    inner: int
    """Hidden size of the projector."""
    activation: str
    bias: bool
    is_normed: bool
    """Whether the projector begins with a norm."""

    @property
    def num_weights(self) -> int:
        wide = self.vit.hidden * self.merge**2
        return self.vit.num_weights() + (wide + self.size_out) * self.inner


def lfm2_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, vision = text_part(keys, default="lfm2"), part(keys, "vision_config")
    if keys.get("tie_embedding") is None and keys.get("tie_word_embeddings") is None:
        text = text.but(tie_word_embeddings=True)
    count = vision.size("num_patches", 256)
    if isqrt(count) ** 2 != count:
        raise vision.wrong("num_patches", "a square number")
    if keys.get("vision_feature_layer") not in (None, -1):
        raise keys.wrong("vision_feature_layer", "-1, the last layer")
    vit = read_vit(vision.but(image_size=isqrt(count) * vision.size("patch_size", 16)))
    activation = str(keys.get("projector_hidden_act") or "gelu")
    if activation not in ACTIVATIONS:
        raise keys.wrong("projector_hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    tower = Lfm2VLFacts(
        vit=vit,
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id", "image_token_index", default=396),
        merge=keys.size("downsample_factor", 2),
        inner=keys.size("projector_hidden_size", 2560),
        activation=activation,
        bias=keys.flag("projector_bias", True),
        is_normed=keys.flag("projector_use_layernorm", True),
    )
    return text, MediaFacts("lfm2_vl", ("image",), tower)
