"""The sampling that a request gets where it says nothing: the model's own, and what the user laid over it."""

import json
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.model import Checkpoint
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


def unsaid(config: EngineConfig) -> tuple[tuple[int, ...], ...]:
    """Tokens that no answer has, and that none begins with, of models that write down what they hear."""
    media, vocab = config.checkpoint.facts.media, config.checkpoint.facts.vocab
    if media is None or not media.transcribes:
        return (), ()
    merged = _merged(config)
    return tuple(tuple(id for id in merged.get(key) or () if 0 <= id < vocab) for key in _UNSAID_KEYS)


def default_sampling(config: EngineConfig) -> dict[str, Any]:
    """Sampling parameters that a request gets where it says nothing, under SamplingParams' names."""
    unread = sorted(set(config.model.override_generation_config) - {*_SAMPLING_KEYS, *_UNSAID_KEYS})
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
