"""LFM2-VL: SigLIP 2 over an image of any shape, or over its tiles and a thumbnail. LFM3-VL: convolutions and
attention over a grid of patches."""

from dataclasses import dataclass
from math import isqrt

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import TowerFacts, part, read_vit, rope_theta, text_part, token_id
from quire.checkpoint.multimodal.qwen import GridFacts, check_grid
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


@dataclass(frozen=True, slots=True)
class Lfm3VLFacts(GridFacts):
    """A vision encoder over a grid of patches, in which most layers have a convolution in place of
    attention."""

    attends: tuple[bool, ...] = ()
    """Whether each layer has attention."""
    kernel: int = 3
    """Kernel size of the convolutions."""
    theta: float = 1e6
    inner: int = 0
    """Hidden size of the projector."""
    bias: bool = True
    """Whether the projector has biases."""

    @property
    def num_weights(self) -> int:
        size, keys = self.hidden, 2 * self.hidden * self.kv_heads // self.heads
        layers = [2 * size + keys if attends else 4 * size + self.kernel**2 for attends in self.attends]
        inner = size * (sum(layers) + self.depth * (3 * self.intermediate + 2))
        first = size * self.channels * self.frames * self.patch**2
        return first + inner + self.inner * (self.merge**2 * size + self.size_out)


def lfm3_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, vision = text_part(keys, default="lfm3"), part(keys, "vision_config")
    text = text.but(tie_word_embeddings=keys.flag("tie_word_embeddings", True))
    depth = vision.size("num_hidden_layers", 14)
    kinds = vision.get("layer_types") or [
        "conv" if layer < 2 or layer % 2 else "full_attention" for layer in range(depth)
    ]
    if not isinstance(kinds, list) or len(kinds) != depth or not {*kinds} <= {"conv", "full_attention"}:
        raise vision.wrong("layer_types", f"{depth} entries, each conv or full_attention")
    activation = str(keys.get("projector_hidden_act") or "gelu")
    if activation not in ACTIVATIONS:
        raise keys.wrong("projector_hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    start_id = token_id(keys, "vision_start_token_id", default=125009)
    end_id = token_id(keys, "vision_end_token_id", default=125010)
    grid = Lfm3VLFacts(
        depth=depth,
        hidden=vision.size("hidden_size", 1024),
        heads=vision.size("num_attention_heads", 16),
        kv_heads=vision.size("num_key_value_heads", 8),
        intermediate=vision.size("intermediate_size", 2560),
        size_out=text.size("hidden_size"),
        patch=vision.size("patch_size", 16),
        frames=vision.size("temporal_patch_size", 2),
        merge=vision.size("spatial_merge_size", 2),
        channels=vision.size("in_channels", 3),
        activation=activation,
        norm_eps=vision.number("norm_eps", 1e-5),
        image_id=token_id(keys, "image_token_id", default=125030),
        video_id=token_id(keys, "video_token_id", default=125029),
        start_id=start_id,
        end_id=end_id,
        video_start_id=start_id,
        video_end_id=end_id,
        times="before",
        attends=tuple(kind == "full_attention" for kind in kinds),
        kernel=vision.size("conv_kernel_size", 3),
        theta=rope_theta(vision.defaults(rope_theta=1e6)),
        inner=keys.size("projector_hidden_size", 4096),
        bias=keys.flag("projector_bias", True),
    )
    return text, MediaFacts("lfm3_vl", ("image", "video"), check_grid(vision, grid))
