"""Parser of MiniMax-M3's tool calls: each parameter is a tag after a mark, and nested values are nested
tags."""

import json
from collections.abc import Mapping
from typing import Any

from quire.text.parsers.calls import ToolParser, is_name, quoted, typed
from quire.text.parsers.streaming import Wait

_MARK = "]<]minimax[>["
_SECTION = f"{_MARK}<tool_call>"
_CALL = f'{_MARK}<invoke name="'
_MAX_DEPTH = 50


class MinimaxM3(ToolParser):
    """Parser of calls as nested tags. Strings are streamed, other values are emitted when complete."""

    keeps_special_tokens = True

    def script(self) -> Wait[None]:
        while (yield from self.until((_SECTION, _CALL), self.text)):
            self.hold()
            yield from self.take(_SECTION)
            yield from self.space()
            if (yield from self.take(_CALL)) and (yield from self._call()):
                yield from self.closing((f"{_MARK}</tool_call>",))
            else:
                self.give_back()

    def _call(self) -> Wait[bool]:
        name = yield from self.header('">')
        if name is None or not is_name(name):
            return False
        yield from self.take('">')
        self.start(name)
        self.arguments("{")
        before = ""
        while (yield from self.space()):
            if (yield from self.take(f"{_MARK}</invoke>")):
                self.arguments("}")
                return True
            key = yield from self._tag()
            if key is None or not (yield from self._parameter(name, key, before)):
                return False
            before = ", "
        return False

    def _tag(self) -> Wait[str | None]:
        """Return the name of the tag that begins at this position; None if no tag begins here."""
        if not (yield from self.take(f"{_MARK}<")):
            return None
        key = yield from self.header(">")
        yield from self.take(">")
        return key

    def _parameter(self, function: str, key: str, before: str) -> Wait[bool]:
        schema = _subschema(self.schemas.get(function), "properties", key)
        start = f"{before}{json.dumps(key, ensure_ascii=False)}: "
        end = f"{_MARK}</{key}>"
        if self.types_of(schema) == {"string"}:
            self.arguments(f'{start}"')
            is_complete = yield from self.until((end,), lambda text: self.arguments(quoted(text)))
            yield from self.take(end)
            self.arguments('"' if is_complete else "")
            return bool(is_complete)
        value = yield from self._value(key, schema, 0)
        self.arguments("" if value is None else start + value)
        return value is not None

    def _value(self, tag: str, schema: Any, depth: int) -> Wait[str | None]:
        """Return the content of a tag as JSON; None if the content is incomplete or nested too deeply."""
        text: list[str] = []
        inner: list[tuple[str, str]] = []
        while (yield from self.until((_MARK,), text.append)):
            if (yield from self.take(f"{_MARK}</{tag}>")):
                return _to_value("".join(text), inner, self.types_of(schema))
            key = yield from self._tag()
            if key is None or depth == _MAX_DEPTH:
                return None
            of_list = key == "item" and "object" not in self.types_of(schema)
            child = _subschema(schema, "items") if of_list else _subschema(schema, "properties", key)
            value = yield from self._value(key, child, depth + 1)
            if value is None:
                return None
            inner.append((key, value))
        return None


def _subschema(schema: Any, *keys: str) -> Any:
    for key in keys:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _to_value(text: str, inner: list[tuple[str, str]], types: frozenset[str]) -> str:
    """Return the JSON of a tag's text or of the tags inside of it."""
    if not inner and not text.strip() and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    if not inner:
        return typed(text, types)
    if "object" not in types and all(key == "item" for key, _ in inner):
        return f"[{', '.join(value for _, value in inner)}]"
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in inner) + "}"
