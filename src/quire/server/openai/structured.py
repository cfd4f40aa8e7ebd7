"""Structured output constraints of a request, in one of three equivalent forms."""

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
"""Older field names, with the key of `structured_outputs` that replaced them."""


def constraint_of(body: GenerateBody) -> dict[str, Any] | None:
    """Return the constraint of a request in the form of SamplingParams; raise if it has several."""
    forms = {
        "response_format": _from_format(body.response_format),
        "structured_outputs": body.structured_outputs,
        "guided_*": _from_guided(body.model_extra or {}),
    }
    constraints = {name: constraint for name, constraint in forms.items() if constraint is not None}
    if len(constraints) > 1:
        raise RequestError(
            f"{' and '.join(constraints)} both constrain the output; send one of them",
            param=next(iter(constraints)),
        )
    return next(iter(constraints.values()), None)


def _from_format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    if format is None:
        return None
    kind = format.get("type", "text")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise RequestError(
            f"`response_format` has no type {kind!r:.80}; known: {known}", param="response_format"
        )
    return _FORMATS[kind](format)


def _from_schema(format: dict[str, Any]) -> dict[str, Any]:
    inner = format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise InvalidBody(
            "`response_format` of type json_schema needs `json_schema.schema`, an object",
            param="response_format",
        )
    return {"json": schema}


_FORMATS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "text": lambda format: None,
    "json_object": lambda format: {"json_object": True},
    "json_schema": _from_schema,
    "structural_tag": lambda format: {"structural_tag": json.dumps(format)},
}


def _from_guided(extra: dict[str, Any]) -> dict[str, Any] | None:
    constraint = {key: extra[name] for name, key in _GUIDED.items() if extra.get(name) not in (None, False)}
    return constraint if constraint.keys() - {"whitespace_pattern"} else None
