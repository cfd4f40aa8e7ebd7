"""What the configurations of models that see have in common: a decoder, a tower, and a token between them."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_OF_THE_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
"""What config.json says for all parts."""
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
_SILENT: dict[str, dict[str, Any]] = {
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
"""What is meant by a decoder's part that does not say it: files of models that see are short."""
_OTHERWISE = {"kimi_k2": "deepseek_v3"}
"""Names that decoders of a family have as parts."""


def stack_weights(layers: int, hidden: int, intermediate: int, matrices: int = 2) -> int:
    """About how many numbers layers have whose feed-forward half has so many matrices."""
    return layers * hidden * (4 * hidden + matrices * intermediate + 8)


@dataclass(frozen=True, slots=True)
class ViTFacts:
    """A stack of layers over the patches of square images."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    image: int
    """Pixels of an image's side."""
    patch: int
    """Pixels of a patch's side."""
    activation: str
    norm_eps: float
    has_class: bool = False
    """Whether a vector that stands for all of the image goes in front of the patches."""

    @property
    def side(self) -> int:
        """Patches of an image's side."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        return self.side**2 + self.has_class

    def num_weights(self, depth: int = 0) -> int:
        """About: of the first so many layers, or of all."""
        first = self.hidden * (3 * self.patch**2 + self.tokens)
        return first + stack_weights(depth or self.layers, self.hidden, self.intermediate)


def part(keys: ConfigReader, name: str) -> ConfigReader:
    """A part of config.json by its name."""
    found = keys.get(name)
    if not isinstance(found, dict):
        raise keys.wrong(name, "an object")
    return ConfigReader(f"{keys.source}, {name}", found)


def text_part(keys: ConfigReader, name: str = "text_config", default: str = "llama") -> ConfigReader:
    """The decoder, as if it were alone."""
    found = keys.get(name)
    text: dict[str, Any] = found if isinstance(found, dict) else {}
    kind = text.get("model_type") or default
    kind = _OTHERWISE.get(kind, kind)
    named = [name for name, family in FAMILIES.items() if family.model_type == kind]
    if not named:
        raise ConfigError(f"{keys.source}: the decoder is a {kind!r}, which is not supported")
    silent = _SILENT.get(kind, {})
    if kind == "gemma3_text" and text.get("rope_parameters") is None:
        silent = silent | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
    whole = {key: keys.get(key) for key in _OF_THE_WHOLE if keys.get(key) is not None}
    if text.get("tie_word_embeddings"):
        whole["tie_word_embeddings"] = True
    return ConfigReader(keys.source, {**keys.values, **silent, **text, **whole, "architectures": named[:1]})


def token_id(keys: ConfigReader, *names: str, default: int | None = None) -> int:
    """The first that is there under one of these names."""
    found = [i for name in names for i in keys.token_ids(name)]
    if not found and default is not None:
        return default
    if not found:
        raise ConfigError(f"{keys.source}: the key {names[0]} is missing")
    return found[0]


def side_of(keys: ConfigReader, key: str, default: int) -> int:
    """A square's side, which some files give twice."""
    value = keys.get(key)
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    return ConfigReader(keys.source, {key: value}).size(key, default)


_VITS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {"image": 224, "patch": 32, "activation": "quick_gelu", "norm_eps": 1e-5},
    "siglip_vision_model": {"image": 224, "patch": 16, "activation": "gelu_pytorch_tanh", "norm_eps": 1e-6},
}


def vit(vision: ConfigReader, default: str) -> ViTFacts:
    """CLIP or SigLIP."""
    kind = vision.get("model_type") or default
    if kind not in _VITS:
        raise ConfigError(f"{vision.source}: the tower is a {kind!r}; known: {', '.join(sorted(_VITS))}")
    silent = _VITS[kind]
    return ViTFacts(
        layers=vision.size("num_hidden_layers", 12),
        hidden=vision.size("hidden_size", 768),
        intermediate=vision.size("intermediate_size", 3072),
        heads=vision.size("num_attention_heads", 12),
        image=side_of(vision, "image_size", silent["image"]),
        patch=side_of(vision, "patch_size", silent["patch"]),
        activation=vision.get("hidden_act") or silent["activation"],
        norm_eps=vision.number("layer_norm_eps", silent["norm_eps"]),
        has_class=kind == "clip_vision_model",
    )
