"""A file that says what is logged where, as Python's `logging.config` reads it."""

import logging.config
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError

_OURS, _THEIRS = "quire", "vllm"


def read_log_config(path: str) -> dict[str, Any]:
    """The JSON of a file. What it says of vLLM's loggers goes for ours, unless it names those."""
    try:
        config = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"log_config_file={path!r} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"log_config_file={path!r} must be a JSON object: {error}") from None
    loggers = config.get("loggers")
    if isinstance(loggers, dict) and _THEIRS in loggers and _OURS not in loggers:
        config["loggers"] = loggers | {_OURS: loggers[_THEIRS]}
    return {"disable_existing_loggers": False} | config


def apply_log_config(path: str) -> None:
    """In this process, from now on."""
    try:
        logging.config.dictConfig(read_log_config(path))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = error.__cause__ or error
        raise ConfigError(f"log_config_file={path!r} cannot be used: {error}: {reason}") from None
