"""Default sampling parameters of requests: those of the model, and the user's overrides."""

import json
from pathlib import Path
from typing import Any

from quire.checkpoint.model import Checkpoint
from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_SAMPLING_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


_SUPPRESS_KEYS = ("suppress_tokens", "begin_suppress_tokens")
_FIRST_KEY, _HEADS_KEY = "max_initial_timestamp_index", "alignment_heads"


def suppressed_tokens(config: EngineConfig) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that a speech-to-text model must not generate: at any position, and at the first
    position. Both tuples are empty for other models."""
    media, vocab = config.checkpoint.facts.media, config.checkpoint.facts.vocab
    if media is None or not media.transcribes:
        return (), ()
    merged = _merge_generation(config)
    return tuple(tuple(id for id in merged.get(key) or () if 0 <= id < vocab) for key in _SUPPRESS_KEYS)


def max_initial_timestamp(config: EngineConfig) -> int | None:
    """Return the latest timestamp index that a transcription may begin with; None for no limit."""
    index = _merge_generation(config).get(_FIRST_KEY)
    return index if isinstance(index, int) and index >= 0 else None


def alignment_heads(config: EngineConfig) -> list[tuple[int, int]]:
    """Return the attention heads for word timestamps as (layer, head) pairs. The default is all heads of the
    upper half of the layers, as in OpenAI's Whisper."""
    facts, named = config.checkpoint.facts, _merge_generation(config).get(_HEADS_KEY)
    num_layers = len(facts.layers)
    if not named:
        return [(layer, head) for layer in range(num_layers // 2, num_layers) for head in range(facts.heads)]
    try:
        heads = [(int(layer), int(head)) for layer, head in named]
    except (TypeError, ValueError):
        heads = [(-1, -1)]
    if not all(0 <= layer < num_layers and 0 <= head < facts.heads for layer, head in heads):
        raise ConfigError(
            f"{_HEADS_KEY} of generation_config.json must be pairs of a layer below {num_layers} and a head "
            f"below {facts.heads}, got {named!r:.80}"
        )
    return heads


def default_sampling(config: EngineConfig) -> dict[str, Any]:
    """Return the default sampling parameters of requests, under the names of SamplingParams."""
    unread = sorted(
        set(config.model.override_generation_config)
        - {*_SAMPLING_KEYS, *_SUPPRESS_KEYS, _FIRST_KEY, _HEADS_KEY}
    )
    if unread:
        warn_once(
            logger,
            f"override_generation_config: {', '.join(unread)} has no effect; known: "
            f"{', '.join(_SAMPLING_KEYS)}",
        )
    merged = _merge_generation(config)
    return {name: merged[key] for key, name in _SAMPLING_KEYS.items() if merged.get(key) is not None}


def _merge_generation(config: EngineConfig) -> dict[str, Any]:
    defaults = _read_generation(config.model.generation_config, config.checkpoint)
    return {**defaults, **config.model.override_generation_config}


def _read_generation(source: str, checkpoint: Checkpoint) -> dict[str, Any]:
    if source == "auto":
        return checkpoint.generation
    if source in ("quire", "vllm"):
        return {}
    path = Path(source).expanduser() / "generation_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generation_config={source!r} is none of auto, quire, vllm, and {path} cannot be read: {error}"
        ) from None
    return content if isinstance(content, dict) else {}
