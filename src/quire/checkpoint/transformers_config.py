"""Reading the config.json of decoders that have no model code in Quire and run through transformers."""

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, TransformersFacts
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

BORROWED = "TransformersForCausalLM"
"""Architecture name in the model table for models that run through transformers with Quire's KV cache."""

OWN_CACHE = "TransformersWithOwnCache"
"""Architecture name in the model table for models that run through transformers with its own cache."""
IMPL_OWN_CACHE = "transformers_own_cache"
"""Value of model_impl that selects transformers' own cache for any model."""
RUN_BY_TRANSFORMERS = ("transformers", IMPL_OWN_CACHE)
"""Values of model_impl that never use Quire's own model code."""

# Names of one setting in the configs of different models.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "v_head_dim")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_UNPAGED_CODE = re.compile(
    r"recurrent_states?\b|conv_states?\b|cache_params\b|\balibi\b|position_bias\b|class \w*Cache\w*\("
    r"|\bcreate_position_ids_from_input_ids\b"
)
"""Pattern of words in the code of models whose attention depends on more than queries, keys and values, or
whose positions follow from the padding (RoBERTa), so that Quire's paged attention cannot replace it."""
_ATTENTION_CODE = re.compile(r"ALL_ATTENTION_FUNCTIONS|AutoModel\w*\.from_config")
"""Pattern of words in model code that uses transformers' attention interface, or another model that does;
Quire's paged attention can replace only such attention."""
_UNPAGED_KINDS = frozenset({"diffllama", "doge", "hrm_text", "jetmoe"})
"""Model types whose attention Quire's paged attention cannot replace: they attend twice in a layer, with
their own mask, or with more heads than the config says."""


def source_of(keys: ConfigReader, name: str, *, trusted: bool) -> str | None:
    """Return the source of the model code: `transformers` or `checkpoint`; None: there is no usable code."""
    if f'"{name}"' in _read_model_tables():
        return "transformers"
    return "checkpoint" if keys.get("auto_map") and trusted and is_installed() else None


def has_setting(name: str, kind: str, key: str) -> bool:
    """Return whether transformers has a decoder of this architecture name and model_type whose code reads the
    key of config.json."""
    is_decoder = name.endswith(("ForCausalLM", "LMHeadModel")) and f'"{name}"' in _read_model_tables()
    return is_decoder and re.search(rf"\b{re.escape(key)}\b", _read_model_code(kind)) is not None


def is_installed() -> bool:
    return find_spec("transformers") is not None


@cache
def _read_model_tables() -> str:
    """Return the text of transformers' model tables; importing them would import torch."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    tables = Path(spec.origin).parent / "models" / "auto"
    names = ("configuration_auto.py", "auto_mappings.py", "modeling_auto.py")
    return "".join((tables / name).read_text(encoding="utf-8") for name in names if (tables / name).is_file())


def read_transformers_model(
    whole: ConfigReader, path: Path, *, remote: bool, own_cache: bool = False
) -> ArchFacts:
    """Read the values of config.json that the engine needs; transformers reads the others. With `own_cache`,
    or if the model does not fit Quire's paged attention, transformers caches each sequence."""
    keys = _text_part(whole)
    if keys.flag("is_encoder_decoder"):
        raise whole.wrong("is_encoder_decoder", "false (only decoders run through transformers)")
    own_cache = own_cache or _needs_own_cache(whole, keys, remote=remote)
    return ArchFacts(
        architecture=OWN_CACHE if own_cache else BORROWED,
        vocab=_size(keys, ("vocab_size",)),
        norm_eps=1e-6,
        max_len=_max_len(keys),
        tied=whole.flag("tie_word_embeddings") or keys.flag("tie_word_embeddings"),
        borrowed=TransformersFacts(json.dumps(dict(whole.values)), str(path), remote, own_cache=own_cache),
        **(_unpaged_sizes(keys) if own_cache else _paged_sizes(keys)),
    )


def _paged_sizes(keys: ConfigReader) -> dict[str, Any]:
    """Return the sizes of a model that uses Quire's paged attention, as fields of ArchFacts."""
    hidden, heads = _size(keys, _HIDDEN), _size(keys, _HEADS)
    return {
        "hidden": hidden,
        "intermediate": _feed_forward_width(keys, hidden),
        "heads": heads,
        "kv_heads": _size(keys, _KV_HEADS, 1 if keys.get("multi_query") else heads),
        "head_dim": _size(keys, _HEAD_DIM, hidden // heads),
        "layers": tuple(LayerFacts(None, window) for window in _windows(keys, _size(keys, _LAYERS))),
    }


def _needs_own_cache(whole: ConfigReader, keys: ConfigReader, *, remote: bool) -> bool:
    """Return whether the code or config of a model shows that Quire's paged attention cannot replace its
    attention."""
    layers: Any = keys.get("layer_types")
    values = [keys.get(name) for name in (*_HEADS, *_KV_HEADS, *_HEAD_DIM, *_INTERMEDIATE)]
    if (
        (isinstance(layers, list) and not {*map(str, layers)} <= {*_ATTENTION_KINDS})
        or any(isinstance(value, list) for value in values)
        or keys.get("kv_lora_rank") is not None
        or all(keys.get(name) is None for name in _HEADS)
    ):
        return True
    kinds = [str(part.get("model_type") or "") for part in (whole, keys)]
    code = "" if remote else "".join(map(_read_model_code, dict.fromkeys(kinds)))
    return bool(code) and (
        bool(_UNPAGED_KINDS.intersection(kinds))
        or _UNPAGED_CODE.search(code) is not None
        or _ATTENTION_CODE.search(code) is None
    )


@cache
def _read_model_code(kind: str) -> str:
    """Return the code of transformers' models of this model_type; empty if there is none."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    folders = re.findall(rf'\("{re.escape(kind)}", "([a-z0-9_]+)"\)', _read_model_tables())
    models = Path(spec.origin).parent / "models"
    name = kind.replace("-", "_")
    files = [
        models / folder / f"modeling_{file}.py" for folder in (*folders, name) for file in (folder, name)
    ]
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")


def _unpaged_sizes(keys: ConfigReader) -> dict[str, Any]:
    """Return the sizes of a model that transformers runs with its own cache, as fields of ArchFacts."""
    hidden, heads = _size(keys, _HIDDEN), _size_or_one(keys, _HEADS)
    return {
        "hidden": hidden,
        "intermediate": _size_or_one(keys, _INTERMEDIATE),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": max(hidden // heads, 1),
        "layers": (LayerFacts(None, mixer="transformers"),) * _size_or_one(keys, _LAYERS),
    }


def _size_or_one(keys: ConfigReader, names: tuple[str, ...]) -> int:
    """Return the first positive integer under one of the keys; 1 if there is none, for example if values are
    lists by layer. Only the estimated number of parameters depends on this size."""
    values = [keys.get(name) for name in names]
    return next((value for value in values if isinstance(value, int) and value > 0), 1)


def _text_part(keys: ConfigReader) -> ConfigReader:
    """Return the keys of the decoder of a multimodal model; keys of other models are returned unchanged."""
    text = keys.get("text_config")
    return ConfigReader(f"{keys.source}, text_config", text) if isinstance(text, dict) else keys


def _size(keys: ConfigReader, names: tuple[str, ...], default: int | None = None) -> int:
    key = next((name for name in names if keys.get(name) is not None), None)
    if key is not None:
        return keys.size(key)
    if default is None:
        raise ConfigError(
            f"{keys.source}: none of the keys {', '.join(names)} is set; only decoders that have one of them"
            " run through transformers"
        )
    return default


def _feed_forward_width(keys: ConfigReader, hidden: int) -> int:
    """Return the number of feed-forward activations of one token, over all experts that it uses."""
    experts = _size(keys, ("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 1)
    expert = _size(keys, ("moe_intermediate_size",), 1)
    return max(_size(keys, _INTERMEDIATE, 4 * hidden), experts * expert)


def _windows(keys: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer if config.json has it; None: the KV cache keeps all tokens. A
    layer whose window is unknown only keeps more tokens than necessary."""
    kinds: Any = keys.get("layer_types")
    if kinds is None:
        return (None,) * num_layers
    if not isinstance(kinds, list):
        raise keys.wrong("layer_types", "a list")
    if len(kinds) != num_layers or "sliding_attention" not in kinds or keys.get("sliding_window") is None:
        return (None,) * num_layers
    window = keys.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_len(keys: ConfigReader) -> int:
    """Return the maximum sequence length, including RoPE scaling unless the scaling depends on the batch."""
    length = max_len_of(keys)
    block: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        section = keys.get(key) or {}
        if not isinstance(section, dict):
            raise keys.wrong(key, "an object")
        block |= section
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
        # These frequencies depend on the longest sequence of a batch: beyond this length, the output of a
        # request would depend on other requests.
        length = original if kind == "longrope" and original else length
        warn_once(logger, f"{keys.source}: through transformers, {kind} rope is limited to {length} tokens")
    return length
