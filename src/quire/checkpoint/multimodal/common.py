"""Common parts of multimodal configurations: the decoder, the vision encoder, and token ids."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_SHARED_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
"""Top-level keys of config.json that also apply to the decoder."""
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_GEMMA = {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": _LLAMA | {"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
"""Default values of text_config by model_type; multimodal checkpoints omit values that equal the defaults."""
_TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types of decoders that are read as another type."""


def stack_weights(layers: int, hidden: int, intermediate: int, matrices: int = 2) -> int:
    """Return the approximate number of parameters of transformer layers with `matrices` feed-forward matrices
    each."""
    return layers * hidden * (4 * hidden + matrices * intermediate + 8)


@dataclass(frozen=True, slots=True)
class ViTFacts:
    """Sizes of a vision transformer over the patches of square images."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    image: int
    """Image side in pixels."""
    patch: int
    """Patch side in pixels."""
    activation: str
    norm_eps: float
    has_class: bool = False
    """Whether a class token precedes the patches."""

    @property
    def side(self) -> int:
        """Return the number of patches per image side."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        return self.side**2 + self.has_class

    def num_weights(self, depth: int = 0) -> int:
        """Return the approximate number of parameters of the first `depth` layers, or of all layers if
        `depth` is 0."""
        first = self.hidden * (3 * self.patch**2 + self.tokens)
        return first + stack_weights(depth or self.layers, self.hidden, self.intermediate)


@dataclass(frozen=True, slots=True)
class TowerFacts:
    """A vision transformer, and the size of its outputs after the projector."""

    vit: ViTFacts
    size_out: int
    """Output size: the decoder's hidden size."""
    image_id: int
    """Placeholder token of an image."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of an image."""
        return self.vit.tokens

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters, here with a projector of one matrix."""
        return self.vit.num_weights() + self.vit.hidden * self.size_out


@dataclass(frozen=True, slots=True)
class ShuffledFacts(TowerFacts):
    """A vision transformer over tiles; pixel shuffle merges squares of patches into tokens."""

    gather: int
    """Side of the square of patches that becomes one token."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a tile."""
        return (self.vit.side // self.gather) ** 2

    @property
    def num_weights(self) -> int:
        return self.vit.num_weights() + self.gather**2 * self.vit.hidden * self.size_out


def part(keys: ConfigReader, name: str) -> ConfigReader:
    """Return a section (nested object) of config.json by name; raise a ConfigError if it is missing."""
    section = keys.get(name)
    if not isinstance(section, dict):
        raise keys.wrong(name, "an object")
    return ConfigReader(f"{keys.source}, {name}", section)


def text_part(keys: ConfigReader, name: str = "text_config", default: str = "llama") -> ConfigReader:
    """Return the keys of the decoder, as in a text-only config.json: from the section `name` and from shared
    top-level keys. `default` is the decoder's default model_type."""
    section = keys.get(name)
    text: dict[str, Any] = section if isinstance(section, dict) else {}
    kind = text.get("model_type") or default
    kind = _TYPE_ALIASES.get(kind, kind)
    named = [name for name, family in FAMILIES.items() if family.model_type == kind]
    if not named:
        raise ConfigError(f"{keys.source}: the decoder is a {kind!r}, which is not supported")
    defaults = _TEXT_DEFAULTS.get(kind, {})
    if kind == "gemma3_text" and text.get("rope_parameters") is None:
        defaults = defaults | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
    whole = {key: keys.get(key) for key in _SHARED_KEYS if keys.get(key) is not None}
    if text.get("tie_word_embeddings"):
        whole["tie_word_embeddings"] = True
    return ConfigReader(keys.source, {**keys.values, **defaults, **text, **whole, "architectures": named[:1]})


def token_id(keys: ConfigReader, *names: str, default: int | None = None) -> int:
    """Return the first token id that is set under one of these keys, or the default."""
    ids = [i for name in names for i in keys.token_ids(name)]
    if not ids and default is not None:
        return default
    if not ids:
        raise ConfigError(f"{keys.source}: the key {names[0]} is missing")
    return ids[0]


def side_of(keys: ConfigReader, key: str, default: int) -> int:
    """Return the side of a square, stored as a number or as a list of equal numbers."""
    value = keys.get(key)
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    return ConfigReader(keys.source, {key: value}).size(key, default)


def rope_theta(vision: ConfigReader) -> float:
    """Return the rope base of a vision encoder: from rope_parameters or, in older files, the top level."""
    rope = vision.get("rope_parameters")
    return (ConfigReader(vision.source, rope) if isinstance(rope, dict) else vision).number("rope_theta", 1e4)


def read_vit(
    vision: ConfigReader,
    *,
    layers: int = 12,
    hidden: int = 768,
    intermediate: int = 3072,
    heads: int = 12,
    image: int = 224,
    patch: int = 16,
    activation: str = "gelu_pytorch_tanh",
    norm_eps: float = 1e-6,
    eps_key: str = "layer_norm_eps",
    has_class: bool = False,
) -> ViTFacts:
    """Read a vision transformer. The parameters after `vision` are defaults for missing keys; their own
    defaults are those of SigLIP."""
    return ViTFacts(
        layers=vision.size("num_hidden_layers", layers),
        hidden=vision.size("hidden_size", hidden),
        intermediate=vision.size("intermediate_size", intermediate),
        heads=vision.size("num_attention_heads", heads),
        image=side_of(vision, "image_size", image),
        patch=side_of(vision, "patch_size", patch),
        activation=vision.get("hidden_act") or activation,
        norm_eps=vision.number(eps_key, norm_eps),
        has_class=has_class,
    )


def check_gather(source: str, vit: ViTFacts, gather: int) -> None:
    """Raise if the patches along an image side cannot be merged `gather` by `gather`."""
    if vit.side % gather:
        raise ConfigError(f"{source}: {vit.side} patches a side cannot be gathered by {gather}")


_VITS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {"patch": 32, "activation": "quick_gelu", "norm_eps": 1e-5, "has_class": True},
    "siglip_vision_model": {},
}


def vit(vision: ConfigReader, default: str) -> ViTFacts:
    """Read a CLIP or SigLIP encoder; `default` is its default model_type."""
    kind = vision.get("model_type") or default
    if kind not in _VITS:
        raise ConfigError(
            f"{vision.source}: the vision encoder {kind!r} is not supported; known:"
            f" {', '.join(sorted(_VITS))}"
        )
    return read_vit(vision, **_VITS[kind])
