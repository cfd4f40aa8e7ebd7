"""The sampling that a request gets where it says nothing: the model's own, and what the user laid over it."""

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


_UNSAID_KEYS = ("suppress_tokens", "begin_suppress_tokens")
_FIRST_KEY, _HEADS_KEY = "max_initial_timestamp_index", "alignment_heads"


def unsaid(config: EngineConfig) -> tuple[tuple[int, ...], ...]:
    """Tokens that no answer has, and that none begins with, of models that write down what they hear."""
    media, vocab = config.checkpoint.facts.media, config.checkpoint.facts.vocab
    if media is None or not media.transcribes:
        return (), ()
    merged = _merged(config)
    return tuple(tuple(id for id in merged.get(key) or () if 0 <= id < vocab) for key in _UNSAID_KEYS)


def max_first_moment(config: EngineConfig) -> int | None:
    """How late an answer that tells the time may begin, in moments; None: at any of them."""
    found = _merged(config).get(_FIRST_KEY)
    return found if isinstance(found, int) and found >= 0 else None


def alignment_heads(config: EngineConfig) -> list[tuple[int, int]]:
    """The heads that follow a sound, by layer and number: those that the checkpoint names, else all of the
    upper half, as with Whisper's makers."""
    facts, named = config.checkpoint.facts, _merged(config).get(_HEADS_KEY)
    num_layers = len(facts.layers)
    if not named:
        return [(layer, head) for layer in range(num_layers // 2, num_layers) for head in range(facts.heads)]
    try:
        found = [(int(layer), int(head)) for layer, head in named]
    except (TypeError, ValueError):
        found = [(-1, -1)]
    if not all(0 <= layer < num_layers and 0 <= head < facts.heads for layer, head in found):
        raise ConfigError(
            f"{_HEADS_KEY} of generation_config.json must be pairs of a layer below {num_layers} and a head "
            f"below {facts.heads}, got {named!r:.80}"
        )
    return found


def default_sampling(config: EngineConfig) -> dict[str, Any]:
    """Sampling parameters that a request gets where it says nothing, under SamplingParams' names."""
    unread = sorted(
        set(config.model.override_generation_config)
        - {*_SAMPLING_KEYS, *_UNSAID_KEYS, _FIRST_KEY, _HEADS_KEY}
    )
    if unread:
        warn_once(
            logger,
            f"override_generation_config: {', '.join(unread)} not read; known: {', '.join(_SAMPLING_KEYS)}",
        )
    merged = _merged(config)
    return {ours: merged[theirs] for theirs, ours in _SAMPLING_KEYS.items() if merged.get(theirs) is not None}


def _merged(config: EngineConfig) -> dict[str, Any]:
    own = _generation(config.model.generation_config, config.checkpoint)
    return {**own, **config.model.override_generation_config}


def _generation(source: str, checkpoint: Checkpoint) -> dict[str, Any]:
    if source == "auto":
        return checkpoint.generation
    if source in ("quire", "vllm"):
        return {}
    path = Path(source).expanduser() / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generation_config={source!r} is none of auto, quire, vllm, and {path} cannot be read: {error}"
        ) from None
    return found if isinstance(found, dict) else {}
