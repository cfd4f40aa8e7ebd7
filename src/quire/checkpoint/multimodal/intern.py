"""InternVL 2.5 and 3, Qianfan-OCR: InternViT over image tiles, and pixel shuffle of the patches."""

from dataclasses import dataclass, replace
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ViTFacts, check_gather, part, read_vit, text_part
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class InternFacts:
    """InternViT and its projector."""

    vit: ViTFacts
    is_rms: bool
    """Whether norms are RMS norms."""
    qkv_bias: bool
    qk_norm: bool
    qk_eps: float
    depth: int
    """Number of layers after which the hidden states are taken."""
    is_normed: bool
    """Whether there is a norm after all layers."""
    first: int
    """Number of first encoder outputs that are dropped (1: the class token)."""
    gather: int
    """Side of the square of patches that pixel shuffle merges into one token."""
    size_out: int
    activation: str
    most_tiles: int
    is_tiled: bool
    """Whether large images are tiled by default."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a tile."""
        return (self.vit.side // self.gather) ** 2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return self.vit.num_weights(self.depth) + self.size_out * (
            self.gather**2 * self.vit.hidden + self.size_out
        )


def internvl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read an InternVL checkpoint in the format of transformers."""
    text = text_part(keys, default="qwen2")
    vision = part(keys, "vision_config")
    depth = _read_depth(keys, "vision_feature_layer", vision)
    facts = _read_facts(
        keys,
        vision,
        text,
        qkv_bias=vision.flag("attention_bias"),
        qk_norm=vision.flag("use_qk_norm"),
        depth=depth,
        is_normed=depth == vision.size("num_hidden_layers", 24) and not vision.flag("use_mean_pooling", True),
        first=int(keys.get("vision_feature_select_strategy") in (None, "default")),
    )
    return text, MediaFacts("internvl", ("image", "video"), facts)


def qianfan_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read Qianfan-OCR as transformers has it: InternVL without videos, with Qwen 3 and tensors under their
    original names."""
    vision = part(keys.defaults(vision_config={}), "vision_config")
    vision = vision.defaults(attention_bias=True)
    _, media = internvl(keys.but(vision_config=dict(vision.values)))
    return text_part(keys, default="qwen3"), replace(media, modalities=("image",))


def internvl_chat(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read an InternVL checkpoint in the original format, which is for remote code."""
    text = text_part(keys, "llm_config", "qwen2")
    vision = part(keys, "vision_config")
    if keys.get("force_image_size") is not None:
        vision = vision.but(image_size=keys.size("force_image_size"))
    facts = _read_facts(
        keys,
        vision,
        text,
        qkv_bias=vision.flag("qkv_bias"),
        qk_norm=vision.flag("qk_normalization", True),
        qk_eps=vision.number("layer_norm_eps", 1e-6),
        depth=_read_depth(keys, "select_layer", vision),
        is_normed=False,
        first=1,
        most_tiles=keys.size("max_dynamic_patch", 6),
        is_tiled=keys.flag("dynamic_image_size"),
    )
    return text, MediaFacts("internvl", ("image",), facts)


def _read_depth(keys: ConfigReader, key: str, vision: ConfigReader) -> int:
    layers, chosen = vision.size("num_hidden_layers", 24), keys.get(key)
    chosen = -1 if chosen is None else chosen
    if not isinstance(chosen, int) or not -layers <= chosen <= layers:
        raise keys.wrong(key, f"one of {layers} layers")
    return chosen % (layers + 1)


def _read_facts(keys: ConfigReader, vision: ConfigReader, text: ConfigReader, **facts: Any) -> InternFacts:
    sizes: dict[str, Any] = {
        "layers": 24,
        "hidden": 1024,
        "intermediate": 4096,
        "heads": 16,
        "image": 448,
        "patch": 14,
    }
    vit = read_vit(vision, **sizes, activation="gelu", has_class=True)
    gather = round(1 / keys.number("downsample_ratio", 0.5))
    check_gather(keys.source, vit, gather)
    norm = vision.get("norm_type") or "layer_norm"
    if norm not in ("layer_norm", "rms_norm"):
        raise vision.wrong("norm_type", "'layer_norm' or 'rms_norm'")
    rest = {"qk_eps": 1e-6, "most_tiles": 12, "is_tiled": True} | facts
    return InternFacts(
        vit=vit,
        is_rms=norm == "rms_norm",
        gather=gather,
        size_out=text.size("hidden_size"),
        activation=keys.get("projector_hidden_act") or "gelu",
        **rest,
    )
