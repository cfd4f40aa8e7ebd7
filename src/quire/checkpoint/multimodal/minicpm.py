"""MiniCPM-V 2.6 to 4.6: SigLIP over an image and its slices, whose patches become few vectors."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import ViTFacts, part, side_of, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_DECODERS = {2.6: "Qwen2ForCausalLM", 4.0: "LlamaForCausalLM", 4.5: "Qwen3ForCausalLM"}
"""By version."""


@dataclass(frozen=True, slots=True)
class MiniCPMFacts:
    """A tower, and what makes few of its many vectors."""

    vit: ViTFacts
    """Of the largest square that it has places for."""
    depth: int
    """Layers of it that are used."""
    size_out: int
    image_id: int | None
    """The token in whose places an image's vectors stand; None: the tokenizer's unknown one."""
    video_id: int | None = None
    """The same of a video's; None: an image's."""
    queries: int = 0
    """Vectors of a slice, each out of all of its patches; 0: one is made of each square of them;"""
    merged: int | None = None
    """for the first time behind this layer, and again behind all; None: only there."""
    is_valued: bool = False
    """Whether where a patch is belongs to what queries get, in place of to what they look at."""

    @property
    def unit(self) -> int:
        """Patches of a side that come together in one vector."""
        return 1 if self.queries else 2 if self.merged is None else 4

    @property
    def num_weights(self) -> int:
        """About."""
        return self.vit.num_weights(self.depth) + (self._sampled if self.queries else self._merged)

    @property
    def _sampled(self) -> int:
        return self.size_out * (self.vit.hidden + self.queries + 5 * self.size_out)

    @property
    def _merged(self) -> int:
        wide = 4 * self.vit.hidden
        inner = 0 if self.merged is None else wide * (5 * self.vit.intermediate + self.vit.hidden)
        return inner + wide * (wide + self.size_out)


def minicpm_v(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """As its makers have 2.6, 4.0 and 4.5: what config.json says of the decoder is not a part of it."""
    version = keys.get("version")
    if not isinstance(version, (int, float)) or version not in _DECODERS:
        raise keys.wrong("version", f"one of {', '.join(map(str, _DECODERS))}")
    text = keys.but(architectures=[_DECODERS[version]])
    vit = _vit(part(keys, "vision_config"))
    facts = MiniCPMFacts(
        vit=vit,
        depth=vit.layers - keys.flag("drop_vision_last_layer"),
        size_out=text.size("hidden_size"),
        image_id=None,
        queries=keys.size("query_num", 64),
        is_valued=version >= 4.5,
    )
    return text, MediaFacts("minicpm_v", ("image", "video"), facts)


def minicpm_v46(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """As transformers has 4.6."""
    text = text_part(keys, default="qwen3_5_text")
    vit = _vit(part(keys, "vision_config"))
    layer = keys.get("insert_layer_id")
    layer = 6 if layer is None else layer
    if not isinstance(layer, int) or not 0 <= layer < vit.layers:
        raise keys.wrong("insert_layer_id", f"one of {vit.layers} layers")
    if side_of(keys, "merge_kernel_size", 2) != 2 or keys.size("merger_times", 1) != 1:
        raise ConfigError(f"{keys.source}: squares of patches are merged otherwise than once by 2")
    facts = MiniCPMFacts(
        vit=vit,
        depth=vit.layers,
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id"),
        video_id=token_id(keys, "video_token_id", "image_token_id"),
        merged=None if keys.get("downsample_mode") == "4x" else layer,
    )
    return text, MediaFacts("minicpm_v", ("image", "video"), facts)


def _vit(vision: ConfigReader) -> ViTFacts:
    return ViTFacts(
        layers=vision.size("num_hidden_layers", 12),
        hidden=vision.size("hidden_size", 768),
        intermediate=vision.size("intermediate_size", 3072),
        heads=vision.size("num_attention_heads", 12),
        image=side_of(vision, "image_size", 224),
        patch=side_of(vision, "patch_size", 16),
        activation=vision.get("hidden_act") or "gelu_pytorch_tanh",
        norm_eps=vision.number("layer_norm_eps", 1e-6),
    )
