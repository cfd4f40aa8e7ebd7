"""Code shared by the tool parsers: names, ids, schemas, and white space next to calls."""

import ast
import json
import random
import re
import string
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.data.output_pieces import ToolArguments, ToolStart
from quire.text.parsers.json_text import JsonParser
from quire.text.parsers.streaming import Wait

IdMaker = Callable[[int, str], str]
"""Function that returns the id of a call, by its index in the output and the name of the function."""
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters, by function name."""

_NAME = re.compile(r"""[^\s<>(){}\[\]"'`,;\ud800-\udfff]+""")
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NULLS = ("null", "none")
_BOOLEANS = {"true": True, "false": False}


def vllm_id(index: int, name: str) -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def mistral_id(index: int, name: str) -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


def kimi_id(index: int, name: str) -> str:
    return f"functions.{name}:{index}"


class ToolParser(JsonParser):
    """Base of tool parsers: splits an output into text and calls. White space next to a call is dropped."""

    default_id: IdMaker = staticmethod(vllm_id)

    def __init__(
        self, marks: Any = None, *, schemas: Schemas | None = None, make_id: IdMaker | None = None
    ) -> None:
        """Create a parser. `marks` are the texts that mark calls, for a class that parses several formats;
        `schemas` are those of the parameters by function name; `make_id` returns the id of a call."""
        self.marks = marks
        self.schemas = schemas or {}
        self.make_id = make_id or self.default_id
        self._types: dict[int, frozenset[str]] = {}
        """Cache of `types_of` by `id()` of the schema, which is used for every parameter."""
        self._num_calls = 0
        self._blank: list[str] = []
        """White space after the last text, which is dropped if a call follows."""
        self._after_call = False
        super().__init__()

    def text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        stripped = text.rstrip()
        if stripped:
            super().text("".join(self._blank) + stripped)
            self._blank = []
        self._blank.append(text[len(stripped) :])

    def end(self) -> list[Any]:
        pieces = super().end()
        super().text("".join(self._blank))
        self._blank = []
        return pieces + self._advance()

    def start(self, name: str, id_: str | None = None) -> None:
        """Emit the start of a call. The text since `hold` can no longer be emitted as plain text."""
        self.release()
        self._blank, self._after_call = [], True
        self._num_calls += 1
        index = self._num_calls - 1
        self._out.append(ToolStart(index, id_ or self.make_id(index, name), name))

    def arguments(self, text: str) -> None:
        """Emit the next part of the JSON arguments of the last call."""
        self._out.append(ToolArguments(self._num_calls - 1, text))

    def closing(self, marks: Iterable[str]) -> Wait[str]:
        """Skip marks after a call, such as `</tool_call>`; return the next character, empty at the end."""
        marks = tuple(marks)
        char = yield from self.space()
        while char and (yield from self.take(*marks)):
            char = yield from self.space()
        return char

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """Return the types that the schema allows for a parameter; empty if the schema has no type for it."""
        properties = self.schemas.get(function, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return self.types_of(schema)

    def types_of(self, schema: Any) -> frozenset[str]:
        if id(schema) not in self._types:
            self._types[id(schema)] = types_of(schema)
        return self._types[id(schema)]


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if the schema has no type."""
    return frozenset(_types(schema))


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def to_json(value: Any) -> str | None:
    """Return a value as JSON, or None if it has no JSON form. Unpaired surrogates are escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return json.dumps(value) if _LONE_SURROGATE.search(text) else text
    except (TypeError, ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """Return the text escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(text: str, types: frozenset[str]) -> str:
    """Return the text of a parameter as JSON of one of these types; as a string if none matches."""
    word = text.strip()
    if "null" in types and word.lower() in _NULLS:
        return "null"
    if "boolean" in types and word.lower() in _BOOLEANS:
        return word.lower()
    if not types or types - {"string", "null", "boolean"}:
        value = _literal(word)
        if not types or _types_of_value(value) & types:
            encoded = to_json(value) if value is not INVALID else None
            if encoded is not None:
                return encoded
    return json.dumps(text, ensure_ascii=False)


INVALID = object()
"""Value that represents a text which cannot be parsed."""


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return INVALID


def _literal(word: str) -> Any:
    """Return the value of a JSON or Python literal; INVALID if the text is neither."""
    value = parse_json(word)
    if value is not INVALID or word[:1] not in ("[", "{", "("):
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return INVALID


def _types_of_value(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list() | tuple():
            return {"array"}
        case dict():
            return {"object"}
        case None:
            return {"null"}
        case str():
            return {"string"}
    return set()


def _types(schema: Any, depth: int = 0) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    types = {name for name in _as_list(schema.get("type")) if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _as_list(schema.get(key)):
            types |= _types(option, depth + 1)
    if not types and "enum" in schema:
        for value in _as_list(schema["enum"]):
            types |= _types_of_value(value)
    return types


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
