"""Defaults of constrained outputs, from `structured_outputs_config`."""

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, check_keys
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
"""Switches of StructuredOutputsParams that may also be turned on for all requests."""
_WITHOUT_EFFECT = ("backend", "disable_fallback")
_ELSEWHERE = {
    "reasoning_parser": "--reasoning-parser",
    "reasoning_parser_plugin": "--reasoning-parser-plugin",
}
_NAMES = (*_SWITCHES, *_WITHOUT_EFFECT, *_ELSEWHERE, "enable_in_reasoning")


def output_switches(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the switches of StructuredOutputsParams that are on for all requests."""
    check_keys("structured_outputs_config", settings, _NAMES)
    for name, value in settings.items():
        if name in (*_SWITCHES, "enable_in_reasoning") and not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config: {name}={value!r} must be true or false")
        if name in _ELSEWHERE and value:
            raise ConfigError(f"structured_outputs_config: set {_ELSEWHERE[name]} in place of {name}")
        if name in _WITHOUT_EFFECT:
            warn_once(logger, f"structured_outputs_config: {name} has no effect, since there is one backend")
    return tuple(name for name in _SWITCHES if settings.get(name))


def constrains_reasoning(settings: Mapping[str, Any]) -> bool:
    """Return whether a constraint begins with the first token of an output, not after its reasoning."""
    return bool(settings.get("enable_in_reasoning"))
