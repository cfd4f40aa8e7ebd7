"""FastAPI field validators that all applications of a process share, since building them takes most of the
time to declare routes."""

from typing import Any

import fastapi.routing
from fastapi.dependencies import utils
from fastapi.utils import create_model_field

_fields: dict[str, Any] = {}


def shared_field(**parts: Any) -> Any:
    key = repr(parts)
    if key not in _fields:
        _fields[key] = create_model_field(**parts)
    return _fields[key]


def share_fields() -> None:
    for module in (fastapi.routing, utils):
        module.create_model_field = shared_field  # type: ignore[attr-defined]
