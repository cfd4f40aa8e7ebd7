"""Reading the configuration keys that all decoders share."""

from collections.abc import Sequence
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import longest, max_len_of, read_rope
from quire.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types in config.json."""
Windows = tuple[int | None, ...]
"""Sliding window of each layer in tokens; None: full attention."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}
"""Fields of ArchFacts for decoders with layer norms instead of RMS norms."""


def decoder(
    keys: ConfigReader,
    *,
    head_dim: int | None = None,
    windows: Windows | None = None,
    layers: tuple[LayerFacts, ...] | None = None,
    activation_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    rotates: Sequence[bool] | None = None,
    pairs: bool = False,
    attention_bias: bool = False,
    biases: bool = False,
    **facts: Any,
) -> ArchFacts:
    """Read the config of a Llama-like decoder; `facts` are fields of ArchFacts, which replace those that are
    read.

    `head_dim` is the default for configs without this key (None: hidden size / heads). `activation_key` and
    `eps_key` are the config keys of the activation and of the norm's epsilon. `windows` has the sliding
    window of each layer, and `rotates` whether the layer has rotary embedding (default: all have); `layers`
    replaces both. `attention_bias` means biases in all projections of attention, `biases` also in the
    feed-forward part.
    """
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", heads)
    if keys.get("head_dim") is None and head_dim is None and hidden % heads:
        raise ConfigError(
            f"{keys.source}: hidden_size {hidden} is not divisible by num_attention_heads {heads} "
            "and no head_dim is given"
        )
    head_dim = keys.size("head_dim", head_dim or hidden // heads)
    check_heads(keys.source, heads, kv_heads)
    if layers is None:
        windows = windows or same_window(None, keys)
        rotates = rotates or [True] * len(windows)
        rope = read_rope(keys, head_dim, pairs=pairs) if any(rotates) else None
        layers = attention_layers(windows, rotates, rope)
    base: dict[str, Any] = {
        "architecture": "",
        "vocab": keys.size("vocab_size"),
        "hidden": hidden,
        "intermediate": keys.size("intermediate_size") if "intermediate" not in facts else 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": keys.number(eps_key, 1e-6),
        "layers": layers,
        "activation": activation_of(keys, activation_key),
        "tied": keys.flag("tie_word_embeddings"),
        "qkv_bias": attention_bias or biases,
        "out_bias": attention_bias or biases,
        "mlp_bias": biases,
        "max_len": max_rope_len(layers) or max_len_of(keys),
    }
    return ArchFacts(**(base | facts))


def activation_of(keys: ConfigReader, key: str = "hidden_act", default: str = "silu") -> str:
    name = keys.get(key) or default
    if str(name) not in _ACTIVATIONS:
        raise keys.wrong(key, f"one of {', '.join(_ACTIVATIONS)} (no other activation is supported)")
    return _ACTIVATIONS[str(name)]


def max_rope_len(layers: tuple[LayerFacts, ...]) -> int:
    """Return the maximum sequence length of the layers' rotary embeddings; 0: there are none."""
    return max((longest(layer.rope) for layer in layers if layer.rope is not None), default=0)


def attention_layers(
    windows: Windows, rotates: Sequence[bool], rope: RopeFacts | None
) -> tuple[LayerFacts, ...]:
    """Return attention layers with these sliding windows; those for which `rotates` is true have the rotary
    embedding `rope`."""
    pairs = zip(windows, rotates, strict=True)
    return tuple(LayerFacts(rope if rotated else None, window) for window, rotated in pairs)


def check_heads(source: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly; "
            "the first must be a multiple of the second"
        )


def same_window(window: int | None, keys: ConfigReader) -> Windows:
    return (window,) * keys.size("num_hidden_layers")


def sliding_window(keys: ConfigReader, default: int | None = 4096) -> int | None:
    """Return the sliding window in tokens, or None for full attention. Null in config.json means full
    attention; a missing key means `default`."""
    if keys.get("sliding_window") is None and ("sliding_window" in keys.values or default is None):
        return None
    return keys.size("sliding_window", default)


def layer_kinds(keys: ConfigReader, *known: str, default: list[str] | None = None) -> list[str]:
    """Return the type of each layer: `layer_types` of config.json or, if it is missing, `default`. Raise a
    ConfigError for a type that is not in `known`."""
    num_layers, kinds = keys.size("num_hidden_layers"), keys.get("layer_types")
    if kinds is None and default is not None:
        kinds = default
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise keys.wrong("layer_types", f"{num_layers} entries, each one of {', '.join(known)}")
    return kinds


def full_every(
    keys: ConfigReader, every: int, *, first: int | None = None, other: str = SLIDING
) -> list[str]:
    """Return the type of each layer. Layers whose index modulo `every` is `first` (default: `every` - 1) have
    full attention, and all other layers the type `other`."""
    at = every - 1 if first is None else first
    return [FULL if layer % every == at else other for layer in range(keys.size("num_hidden_layers"))]


def head_dim_of(keys: ConfigReader) -> int:
    return keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads"))


def kv_sharing_targets(keys: ConfigReader, key: str, kinds: Sequence[Any], shared: int) -> list[int | None]:
    """Return for each layer the index of the layer whose KV cache it uses; None: the layer has its own. The
    last `shared` layers use the KV cache of the last earlier layer of their type."""
    first = max(len(kinds) - shared, 0)
    last = {kind: at for at, kind in enumerate(kinds[:first])}
    if not {*kinds[first:]} <= last.keys():
        raise keys.wrong(key, "a number that leaves a layer of each kind in front")
    return [None] * first + [last[kind] for kind in kinds[first:]]


def unused_kv_pattern(targets: Sequence[int | None]) -> str:
    """Return a regular expression for the key and value weights of layers that use another KV cache."""
    numbers = "|".join(str(at) for at, target in enumerate(targets) if target is not None) or "none"
    return rf"layers\.({numbers})\.self_attn\.[kv]_(proj|norm)\."


def windows_by_kind(keys: ConfigReader, window: int | None, default: list[str] | None = None) -> Windows:
    """Return the sliding window of each layer: `window` for layers of the type sliding_attention, None for
    others."""
    kinds = layer_kinds(keys, FULL, SLIDING, default=default)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def ropes_by_kind(keys: ConfigReader, head_dim: int, *kinds: str) -> dict[str, RopeFacts]:
    """Map each layer type to its rope: from nested `rope_parameters`, which may lack types without layers, or
    the same rope for all types."""
    block = keys.get("rope_parameters")
    nested = {
        kind: block[kind] for kind in kinds if isinstance(block, dict) and isinstance(block.get(kind), dict)
    }
    if not nested:
        return dict.fromkeys(kinds, read_rope(keys, head_dim))
    first = next(iter(nested.values()))
    return {kind: read_rope(keys.but(rope_parameters=nested.get(kind, first)), head_dim) for kind in kinds}
