"""How a body says what its answer must look like: three ways, of which it may use one."""

import json
from collections.abc import Callable
from typing import Any

from quire.errors import RequestError
from quire.server.http.errors import InvalidBody
from quire.server.openai.requests import GenerateBody

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Older names, each with the key of `structured_outputs` that it became."""


def constraint_of(body: GenerateBody) -> dict[str, Any] | None:
    """As SamplingParams take it."""
    ways = {
        "response_format": _from_format(body.response_format),
        "structured_outputs": body.structured_outputs,
        "guided_*": _from_guided(body.model_extra or {}),
    }
    given = {name: way for name, way in ways.items() if way is not None}
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} both say what the answer must look like; send one of them",
            param=next(iter(given)),
        )
    return next(iter(given.values()), None)


def _from_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    kind = asked.get("type", "text")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise RequestError(
            f"`response_format` has no type {kind!r:.80}; known: {known}", param="response_format"
        )
    return _FORMATS[kind](asked)


def _from_schema(asked: dict[str, Any]) -> dict[str, Any]:
    inner = asked.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise InvalidBody(
            "`response_format` of type json_schema needs `json_schema.schema`, an object",
            param="response_format",
        )
    return {"json": schema}


_FORMATS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "text": lambda asked: None,
    "json_object": lambda asked: {"json_object": True},
    "json_schema": _from_schema,
    "structural_tag": lambda asked: {"structural_tag": json.dumps(asked)},
}


def _from_guided(extra: dict[str, Any]) -> dict[str, Any] | None:
    given = {key: extra[name] for name, key in _GUIDED.items() if extra.get(name) not in (None, False)}
    return given if given.keys() - {"whitespace_pattern"} else None
