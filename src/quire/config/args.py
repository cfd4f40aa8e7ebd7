"""Validates engine arguments by name, type and bounds, without reading the model."""

import numbers
import os
from collections.abc import Mapping
from typing import Any

from quire.config.extensions import name_classes
from quire.config.sections import Option, options, options_of
from quire.config.server_sections import SERVER_SECTIONS
from quire.config.unsupported import UNSUPPORTED, check_supported
from quire.config.vllm_names import IGNORED_SWITCHES, IGNORED_VALUES, other_names, translate
from quire.errors import ConfigError, nearest
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

KIND_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a JSON object",
}


def check_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Validate arguments and return them under their current names, without those that are None (not set).

    The model is not read, so that a mistyped flag is reported before any download.
    """
    known, unbuilt = options(), UNSUPPORTED["engine argument"]
    values: dict[str, Any] = {}
    for name, value in translate(name_classes(args)).items():
        if value is None:
            continue
        if name in known:
            value = values[name] = check_value(known[name], value)
        if name in unbuilt:
            check_supported("engine argument", name, value)
        elif name in IGNORED_SWITCHES or name in IGNORED_VALUES:
            if value:
                warn_once(logger, f"{name}={value!r} has no effect in Quire and is ignored")
        elif name not in known:
            raise ConfigError(_unknown(name))
    return values


def _unknown(name: str) -> str:
    """Return the error message for a name that is not an engine argument."""
    if name in options_of(SERVER_SECTIONS) or name in UNSUPPORTED["server flag"]:
        flag = f"--{name.replace('_', '-')}"
        return f"{name!r} is not an engine argument: it belongs to the HTTP server, as `quire serve {flag}`"
    near = nearest(name, sorted([*options(), *other_names()]))
    return f"unknown engine argument {name!r}{near or '; `quire serve --help=all` lists them'}"


def check_value(option: Option, value: Any) -> Any:
    """Return `value` in the option's type; raise if its type is wrong or it is out of bounds."""
    name, kind, rule = option.name, option.kind, option.rule
    if rule.auto and value in ("auto", -1):
        return value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind is tuple:
        return _check_names(name, value)
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if kind is float:
            value = float(value)
        elif kind is int and isinstance(value, numbers.Integral):
            value = int(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{name}={value!r} must be {KIND_NAMES[kind]}{' or `auto`' if rule.auto else ''}")
    if option.choices and value not in option.choices:
        raise ConfigError(f"{name}={value!r} is not supported; known: {', '.join(option.choices)}")
    if isinstance(value, int | float) and not rule.allows(value):
        raise ConfigError(f"{name}={value!r} is out of range: it must be {rule}")
    return value


def _check_names(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(entry, str) and entry for entry in names):
        raise ConfigError(f"{name}={value!r} must be a name or a list of names")
    return tuple(names)
