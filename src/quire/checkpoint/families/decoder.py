"""What the configurations of all decoders have in common, and what they call it."""

from collections.abc import Sequence
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import longest, max_len_of, read_rope
from quire.errors import ConfigError

Windows = tuple[int | None, ...]
"""How far back each layer looks."""
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


def decoder(
    keys: ConfigReader,
    *,
    head_dim: int | None = None,
    windows: Windows | None = None,
    layers: tuple[LayerFacts, ...] | None = None,
    activation_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    turning: Sequence[bool] | None = None,
    pairs: bool = False,
    **facts: Any,
) -> ArchFacts:
    """Llama, but for what `facts` say.

    `head_dim` is meant where config.json names none (else hidden / heads); `activation_key` and `eps_key` are
    what it calls those two.
    Layers differ by `windows` and by which of them turn their heads (all, unless `turning` says), or else as
    `layers` says.
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
        windows = windows or everywhere(None, keys)
        turning = turning or [True] * len(windows)
        rope = read_rope(keys, head_dim, pairs=pairs) if any(turning) else None
        layers = tuple(
            LayerFacts(rope if turns else None, window)
            for window, turns in zip(windows, turning, strict=True)
        )
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
        "max_len": longest_of(layers) or max_len_of(keys),
    }
    return ArchFacts(**(base | facts))


def activation_of(keys: ConfigReader, key: str = "hidden_act", default: str = "silu") -> str:
    name = keys.get(key) or default
    if str(name) not in _ACTIVATIONS:
        raise keys.wrong(key, f"one of {', '.join(_ACTIVATIONS)} (no other activation is supported)")
    return _ACTIVATIONS[str(name)]


def longest_of(layers: tuple[LayerFacts, ...]) -> int:
    """The longest sequence that any layer's rotation is made for; 0: none turns."""
    return max((longest(layer.rope) for layer in layers if layer.rope is not None), default=0)


def check_heads(source: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly; "
            "the first must be a multiple of the second"
        )


def everywhere(window: int | None, keys: ConfigReader) -> Windows:
    return (window,) * keys.size("num_hidden_layers")


def sliding_window(keys: ConfigReader, default: int | None = 4096) -> int | None:
    """An absent key means the family's default; null means full attention."""
    if keys.get("sliding_window") is None and ("sliding_window" in keys.values or default is None):
        return None
    return keys.size("sliding_window", default)


def layer_kinds(keys: ConfigReader, *known: str, default: list[str] | None = None) -> list[str]:
    """`layer_types`: a name for each layer."""
    num_layers, kinds = keys.size("num_hidden_layers"), keys.get("layer_types")
    if kinds is None and default is not None:
        kinds = default
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise keys.wrong("layer_types", f"{num_layers} entries, each one of {', '.join(known)}")
    return kinds


def windows_by_kind(keys: ConfigReader, window: int | None, default: list[str] | None = None) -> Windows:
    """The window where `layer_types` says sliding_attention."""
    kinds = layer_kinds(keys, "full_attention", "sliding_attention", default=default)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def ropes_by_kind(keys: ConfigReader, head_dim: int, *kinds: str) -> dict[str, RopeFacts]:
    """`rope_parameters` by kind of layer where they are so written, else the same for all."""
    block = keys.get("rope_parameters")
    if not isinstance(block, dict) or not all(isinstance(block.get(kind), dict) for kind in kinds):
        return dict.fromkeys(kinds, read_rope(keys, head_dim))
    return {kind: read_rope(keys.but(rope_parameters=block[kind]), head_dim) for kind in kinds}
