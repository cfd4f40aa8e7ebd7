"""The file of --log-config-file, a configuration for Python's `logging.config`."""

import logging.config
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError

_QUIRE, _VLLM = "quire", "vllm"


def read_log_config(path: str) -> dict[str, Any]:
    """Return the configuration. The settings of the logger `vllm` also apply to `quire`, unless the file has
    settings for `quire`."""
    try:
        config = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"log_config_file={path!r} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"log_config_file={path!r} must be a JSON object: {error}") from None
    loggers = config.get("loggers")
    if isinstance(loggers, dict) and _VLLM in loggers and _QUIRE not in loggers:
        config["loggers"] = loggers | {_QUIRE: loggers[_VLLM]}
    return {"disable_existing_loggers": False} | config


def apply_log_config(path: str) -> None:
    try:
        logging.config.dictConfig(read_log_config(path))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = error.__cause__ or error
        raise ConfigError(f"log_config_file={path!r} cannot be used: {error}: {reason}") from None
