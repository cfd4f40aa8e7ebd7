"""The JSON-Schema-Test-Suite (draft 2020-12) as schemas for requests.

`json_schema/suite.json` has the suite's groups: file -> [[description, schema, [[instance, valid]]]].
`json_schema/LICENSE` is the suite's licence."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema

SUITE = Path(__file__).parent / "json_schema" / "suite.json"

TYPE_OF = {
    "object": "additionalProperties maxProperties minProperties patternProperties properties required",
    "array": "items maxItems minItems prefixItems",
    "string": "format maxLength minLength pattern",
    "number": "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf",
}
"""JSON type of the values that a keyword constrains; values of other types are always valid."""

KNOWN = {
    "optional/ecmascript-regex: ECMA 262 \\S matches everything but whitespace": "U+FEFF is no whitespace",
    "optional/format/date-time: validation of date-time strings": "second 60 in any minute",
    "optional/format/date: validation of date strings": "29 February in any year",
    "optional/format/time: validation of time strings": "second 60 in any minute",
}
"""Groups of the suite where llguidance accepts an invalid instance; docs/structured.md lists them, too."""

UNCHECKED_FORMATS = ("date", "date-time", "time")
"""Formats of strings with such a fault: finished answers are not checked for them."""

_ALONE = ("$ref", "$id", "$anchor", "$defs", "$dynamicRef", "$dynamicAnchor", "definitions")
"""Keywords that change their meaning inside another schema."""


@dataclass(frozen=True)
class Group:
    """A schema of the suite, with valid and invalid instances."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


def groups() -> list[Group]:
    result = json.loads(SUITE.read_text(encoding="utf-8"))
    return [
        Group(f"{file}: {description}", schema, [(data, valid) for data, valid in instances])
        for file, item in result.items()
        for description, schema, instances in item
    ]


def cases() -> dict[str, Any]:
    """Return every schema in three forms: unchanged; with the type of its keywords, since a model would
    mostly write another type; and with the next schema as properties of an object."""
    plain = {group.name: group.schema for group in groups()}
    typed = {
        f"{name} ({kind})": {**schema, "type": kind}
        for name, schema in plain.items()
        for kind, keywords in TYPE_OF.items()
        if isinstance(schema, dict) and "type" not in schema and schema.keys() & set(keywords.split())
    }
    simple = [
        (name, {key: value for key, value in schema.items() if key != "$schema"})
        for name, schema in {**plain, **typed}.items()
        if isinstance(schema, dict) and not any(word in json.dumps(schema) for word in _ALONE)
    ]
    pairs = {
        f"{name} + {other}": {
            "type": "object",
            "properties": {"a": schema, "b": second},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for (name, schema), (other, second) in pairwise(simple)
    }
    return plain | typed | pairs


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return _VALIDATOR(schema, format_checker=_FORMATS)


def _fits_pattern(_: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Return whether a pattern matches as in ECMA 262: `\d` and `\w` are ASCII, `\s` is Unicode."""
    ascii_only = re.ASCII if re.search(r"\\[dDwW]", pattern) else 0
    if isinstance(instance, str) and not re.search(pattern, instance, ascii_only):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _fits_pattern})
_FORMATS = jsonschema.FormatChecker(
    set(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers) - set(UNCHECKED_FORMATS)
)
