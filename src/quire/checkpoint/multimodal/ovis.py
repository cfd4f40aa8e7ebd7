"""Ovis 2: patches become weighted sums of the embeddings of a visual vocabulary."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ShuffledFacts, part, read_vit, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_CHOICES = ("softmax", "st_argmax")


@dataclass(frozen=True, slots=True)
class OvisFacts(ShuffledFacts):
    """AIMv2, and the table of visual embeddings."""

    bias: bool
    mlp_bias: bool
    vocab: int
    """Size of the visual vocabulary, without the indicator tokens after it."""
    hard: bool
    """Whether a patch gets the embedding of its most likely visual word (argmax), not a weighted sum."""
    mark_ids: tuple[int, ...]
    """Indicator tokens, which have the last embeddings of the table: start of the image, end of the overview,
    end of a column, end of a row, end of the image."""

    @property
    def num_weights(self) -> int:
        vit = self.vit
        layers = vit.num_weights() + vit.layers * vit.hidden * vit.intermediate
        wide = vit.hidden * self.gather**2
        return layers + self.vocab * (wide + 2) + (self.vocab + len(self.mark_ids)) * self.size_out


def ovis2(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, vision = text_part(keys, default="qwen2"), part(keys, "vision_config")
    sizes: dict[str, Any] = {"layers": 24, "hidden": 1024, "intermediate": 2816, "heads": 8, "patch": 14}
    vit = read_vit(vision, **sizes, activation="silu", norm_eps=1e-5, eps_key="rms_norm_eps")
    gather, choice = vision.size("hidden_stride", 1), vision.get("tokenize_function") or "softmax"
    if vit.side % gather:
        raise vision.wrong("hidden_stride", f"a number that divides the {vit.side} patches of a side")
    if choice not in _CHOICES:
        raise vision.wrong("tokenize_function", f"one of {', '.join(_CHOICES)}")
    mark_ids = keys.token_ids("visual_indicator_token_ids") or tuple(range(151666, 151671))
    if len(mark_ids) != 5 or vision.size("num_visual_indicator_tokens", 5) != len(mark_ids):
        raise ConfigError(f"{keys.source}: visual_indicator_token_ids are {len(mark_ids)}, expected 5")
    tower = OvisFacts(
        vit=vit,
        bias=vision.flag("qkv_bias"),
        mlp_bias=vision.flag("mlp_bias"),
        gather=gather,
        vocab=vision.size("vocab_size", 16384) - len(mark_ids),
        hard=choice == "st_argmax",
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id", default=151665),
        mark_ids=tuple(mark_ids),
    )
    return text, MediaFacts("ovis2", ("image",), tower)
