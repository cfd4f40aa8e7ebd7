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


def default_sampling(config: EngineConfig) -> dict[str, Any]:
    """Sampling parameters that a request gets where it says nothing, under SamplingParams' names."""
    source, overrides = config.model.generation_config, config.model.override_generation_config
    unread = sorted(set(overrides) - set(_SAMPLING_KEYS))
    if unread:
        warn_once(
            logger,
            f"override_generation_config: {', '.join(unread)} not read; known: {', '.join(_SAMPLING_KEYS)}",
        )
    merged = {**_generation(source, config.checkpoint), **overrides}
    return {ours: merged[theirs] for theirs, ours in _SAMPLING_KEYS.items() if merged.get(theirs) is not None}


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
