"""What all parsers of tool calls share: names, ids, schemas, and white space that belongs to a call."""

import ast
import json
import random
import re
import string
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.data.pieces import ToolArguments, ToolStart
from quire.text.parsers.engine import Wait
from quire.text.parsers.json_text import JsonParser

IdMaker = Callable[[int, str], str]
"""(index of the call, name of the function) -> the call's id."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function -> the JSON schema of its parameters."""

_NAME = re.compile(r"""[^\s<>(){}\[\]"'`,;\ud800-\udfff]+""")
_HALF = re.compile(r"[\ud800-\udfff]")
_NULLS = ("null", "none")
_BOOLEANS = {"true": True, "false": False}


def vllm_id(index: int, name: str) -> str:
    """The id of most calls."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def mistral_id(index: int, name: str) -> str:
    """Nine letters and digits, which Mistral's templates ask for."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


def kimi_id(index: int, name: str) -> str:
    """The id as Kimi-K2 writes it."""
    return f"functions.{name}:{index}"


class ToolParser(JsonParser):
    """Turns text into text and tool calls. White space next to a call belongs to it."""

    default_id: IdMaker = staticmethod(vllm_id)

    def __init__(self, *, schemas: Schemas | None = None, make_id: IdMaker | None = None) -> None:
        self.schemas = schemas or {}
        self.make_id = make_id or self.default_id
        self._types: dict[int, frozenset[str]] = {}
        """By the id of the schema, which may be long and is asked for with every parameter."""
        self._num_calls = 0
        self._blank: list[str] = []
        """White space that may be next to a call."""
        self._after_call = False
        super().__init__()

    def text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        kept = text.rstrip()
        if kept:
            super().text("".join(self._blank) + kept)
            self._blank = []
        self._blank.append(text[len(kept) :])

    def end(self) -> list[Any]:
        pieces = super().end()
        super().text("".join(self._blank))
        self._blank = []
        return pieces + self._advance()

    def start(self, name: str, id_: str | None = None) -> None:
        """A call begins; there is no way back."""
        self.release()
        self._blank, self._after_call = [], True
        self._num_calls += 1
        index = self._num_calls - 1
        self._out.append(ToolStart(index, id_ or self.make_id(index, name), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was started last."""
        self._out.append(ToolArguments(self._num_calls - 1, text))

    def closing(self, marks: Iterable[str]) -> Wait[str]:
        """Skip what may stand behind a call; returns the character that follows."""
        marks = tuple(marks)
        char = yield from self.space()
        while char and (yield from self.take(*marks)):
            char = yield from self.space()
        return char

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """The types that the schema allows a parameter; none if it says nothing."""
        properties = self.schemas.get(function, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return self.types_of(schema)

    def types_of(self, schema: Any) -> frozenset[str]:
        """The types that a part of the schemas allows; none if it says nothing."""
        if id(schema) not in self._types:
            self._types[id(schema)] = frozenset(_types(schema))
        return self._types[id(schema)]


def is_name(text: str) -> bool:
    """Whether this can be the name of a function."""
    return _NAME.fullmatch(text) is not None


def to_json(value: Any) -> str | None:
    """A value as JSON; None if it is none. Half of a surrogate pair, which is no character, stays escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return json.dumps(value) if _HALF.search(text) else text
    except (TypeError, ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """Text inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(text: str, types: frozenset[str]) -> str:
    """What a model wrote for a parameter of these types, as JSON; a string if it fits none of them."""
    word = text.strip()
    if "null" in types and word.lower() in _NULLS:
        return "null"
    if "boolean" in types and word.lower() in _BOOLEANS:
        return word.lower()
    if not types or types - {"string", "null", "boolean"}:
        value = _literal(word)
        if not types or _type(value) & types:
            found = to_json(value) if value is not _NOTHING else None
            if found is not None:
                return found
    return json.dumps(text, ensure_ascii=False)


_NOTHING = object()


def _literal(word: str) -> Any:
    """The value that JSON or Python reads."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        pass
    if word[:1] not in ("[", "{", "("):
        return _NOTHING
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOTHING


def _type(value: Any) -> set[str]:
    """The JSON types that a value has."""
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
    found = {named for named in _listed(schema.get("type")) if isinstance(named, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema.get(key)):
            found |= _types(option, depth + 1)
    if not found:
        for value in _listed(schema.get("enum")):
            found |= _type(value)
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
