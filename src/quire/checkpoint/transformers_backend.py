"""Decoders that Quire has no model of: what any config.json says, for transformers to run them."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts, Borrowed, LayerFacts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

BORROWED = "TransformersForCausalLM"
"""The line of the model table that runs them."""

# The names that configurations of different years have for one thing.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "v_head_dim")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
_ATTENTION_KINDS = ("full_attention", "sliding_attention")


def source_of(keys: ConfigReader, name: str, *, trusted: bool) -> str | None:
    """Who has the code of this architecture or model_type: `transformers`, the `checkpoint`, or nobody."""
    if f'"{name}"' in _known_to_transformers():
        return "transformers"
    return "checkpoint" if keys.get("auto_map") and trusted and is_installed() else None


def is_installed() -> bool:
    return find_spec("transformers") is not None


@cache
def _known_to_transformers() -> str:
    """The text of its tables: to import them would import torch."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return ""
    tables = Path(found.origin).parent / "models" / "auto"
    names = ("configuration_auto.py", "auto_mappings.py", "modeling_auto.py")
    return "".join((tables / name).read_text(encoding="utf-8") for name in names if (tables / name).is_file())


def read_borrowed(whole: ConfigReader, path: Path, *, remote: bool) -> ArchFacts:
    """What the engine must know of a decoder; the rest is between transformers and its config.json."""
    keys = _text_part(whole)
    if keys.flag("is_encoder_decoder"):
        raise whole.wrong("is_encoder_decoder", "false (only decoders run through transformers)")
    hidden, heads = _size(keys, _HIDDEN), _size(keys, _HEADS)
    kv_heads = _size(keys, _KV_HEADS, 1 if keys.get("multi_query") else heads)
    windows = _windows(keys, _size(keys, _LAYERS))
    return ArchFacts(
        architecture=BORROWED,
        vocab=_size(keys, ("vocab_size",)),
        hidden=hidden,
        intermediate=_widest(keys, hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(keys, _HEAD_DIM, hidden // heads),
        norm_eps=1e-6,
        layers=tuple(LayerFacts(None, window) for window in windows),
        max_len=_max_len(keys),
        tied=whole.flag("tie_word_embeddings") or keys.flag("tie_word_embeddings"),
        borrowed=Borrowed(json.dumps(dict(whole.values)), str(path), remote),
    )


def _text_part(keys: ConfigReader) -> ConfigReader:
    """The decoder of a model that has other parts, too."""
    text = keys.get("text_config")
    return ConfigReader(f"{keys.source}, text_config", text) if isinstance(text, dict) else keys


def _size(keys: ConfigReader, names: tuple[str, ...], default: int | None = None) -> int:
    given = next((name for name in names if keys.get(name) is not None), None)
    if given is not None and not isinstance(keys.get(given), list):
        return keys.size(given)
    if given is not None:
        raise ConfigError(
            f"{keys.source}: {given} differs between layers, and such models do not run through transformers"
        )
    if default is None:
        raise ConfigError(
            f"{keys.source}: none of the keys {', '.join(names)} is there; only decoders that have them, all"
            " of whose layers attend, run through transformers"
        )
    return default


def _widest(keys: ConfigReader, hidden: int) -> int:
    """Of the feed-forward half, for one token."""
    experts = _size(keys, ("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 1)
    expert = _size(keys, ("moe_intermediate_size",), 1)
    return max(_size(keys, _INTERMEDIATE, 4 * hidden), experts * expert)


def _windows(keys: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Those that config.json names by layer; a layer that turns out to look less far back only keeps more
    than it needs."""
    kinds: Any = keys.get("layer_types")
    if kinds is None:
        return (None,) * num_layers
    if not isinstance(kinds, list):
        raise keys.wrong("layer_types", "a list")
    others = sorted({str(kind) for kind in kinds if kind not in _ATTENTION_KINDS})
    if others:
        raise ConfigError(
            f"{keys.source}: layer_types has {', '.join(others)}, and no other layers than"
            f" {' and '.join(_ATTENTION_KINDS)} run through transformers"
        )
    if len(kinds) != num_layers or "sliding_attention" not in kinds or keys.get("sliding_window") is None:
        return (None,) * num_layers
    window = keys.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_len(keys: ConfigReader) -> int:
    """The longest sequence, with the scaling that holds for any batch counted in."""
    length = max_len_of(keys)
    block: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        said = keys.get(key) or {}
        if not isinstance(said, dict):
            raise keys.wrong(key, "an object")
        block |= said
    parts = [part for part in (block, *block.values()) if isinstance(part, dict)]
    longest = [_stretched(ConfigReader(f"{keys.source}, rope", part), keys, length) for part in parts]
    return max(longest, default=length)


def _stretched(rope: ConfigReader, keys: ConfigReader, length: int) -> int:
    kind = rope.get("type") or rope.get("rope_type") or "default"
    original = rope.get("original_max_position_embeddings") or keys.get("original_max_position_embeddings")
    if kind == "linear":
        return int(length * rope.number("factor", 1.0))
    if kind == "yarn" and original:
        return int(original * rope.number("factor", length / original))
    if kind in ("dynamic", "longrope"):
        # There the frequencies follow the longest sequence of a batch: beyond this length, requests would
        # change each other.
        length = original if kind == "longrope" and original else length
        warn_once(logger, f"{keys.source}: through transformers, {kind} rope is limited to {length} tokens")
    return length
