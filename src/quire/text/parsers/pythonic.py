"""Tool calls written as Python: `[f(a=1), g(b="x")]`."""

import ast
import json
import re
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.text.parsers.calls import IdMaker, Schemas, ToolParser, to_json
from quire.text.parsers.engine import Wait

_FUNCTION = re.compile(r"[^\W\d][\w.-]*")
_LETTER = re.compile(r"[\w.-]")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonMarks:
    """Where such calls stand."""

    opens: tuple[str, ...] = ()
    """What announces them; a bracket too, if there is none."""
    closes: tuple[str, ...] = ()
    lines: bool = False
    """Whether calls stand without brackets, a line each."""


class Pythonic(ToolParser):
    """Calls as Python, each argument handed on when it is whole."""

    keeps_special_tokens = True

    def __init__(
        self, marks: PythonMarks, *, schemas: Schemas | None = None, make_id: IdMaker | None = None
    ) -> None:
        self.marks = marks
        super().__init__(schemas=schemas, make_id=make_id)

    def script(self) -> Wait[None]:
        bare = () if self.marks.lines else ("[",)
        while (yield from self.until((*self.marks.opens, *bare), self.text)):
            self.hold()
            yield from self.take(*self.marks.opens)
            yield from self.space()
            bracket = yield from self.take("[")
            if (bracket or self.marks.lines) and (yield from self._calls()):
                yield from self.closing(self.marks.closes)
            else:
                self.give_back()

    def _calls(self) -> Wait[bool]:
        while True:
            if not (yield from self._call()):
                return False
            char = yield from self.space()
            if char == "]":
                yield from self.take("]")
                return True
            if char == "," or self.marks.lines:
                self.hold()
                yield from self.take(",")
                char = yield from self.space()
                if char in ("", "<"):
                    self.release()
                    return True
            else:
                return False

    def _call(self) -> Wait[bool]:
        yield from self.space()
        name = yield from self.word(_LETTER)
        yield from self.space()
        if not _FUNCTION.fullmatch(name) or not (yield from self.take("(")):
            return False
        written = "{"
        while (char := (yield from self.space())) and char != ")":
            found = yield from self._argument()
            if found is None:
                return False
            if written == "{":
                self.start(name)
            self.arguments(written + found)
            written = ", "
            if (yield from self.space()) == ",":
                yield from self.take(",")
        if not (yield from self.take(")")):
            return False
        if written == "{":
            self.start(name)
        self.arguments("{}" if written == "{" else "}")
        return True

    def _argument(self) -> Wait[str | None]:
        """`key=value` -> `"key": value`; None if it is none."""
        key = yield from self.word(_LETTER)
        yield from self.space()
        if not _FUNCTION.fullmatch(key) or not (yield from self.take("=")):
            return None
        source = yield from self._value()
        value = None if source is None else python_to_json(source)
        return None if value is None else f"{json.dumps(key, ensure_ascii=False)}: {value}"

    def _value(self) -> Wait[str | None]:
        """The source of an expression, up to the comma or bracket that ends it."""
        parts: list[str] = []
        quote, depth = "", 0
        while char := (yield from self.peek()):
            if not quote and not depth and char in ",)":
                return "".join(parts)
            if quote and char == "\\":
                parts.append(char)
                self._at += 1
                char = yield from self.peek()
            elif char == quote:
                quote = ""
            elif not quote and char in "\"'":
                quote = char
            elif not quote:
                depth += (char in "([{") - (char in ")]}")
                if depth < 0:
                    return None
            parts.append(char)
            self._at += 1
        return None


def python_to_json(source: str) -> str | None:
    """A Python literal as JSON, JSON's own words included; None if it is none."""
    # A line break inside of quotes is no Python, and is meant.
    source = source.strip()
    for text in (source, source.replace("\r", "\\r").replace("\n", "\\n")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return to_json(_evaluated(ast.parse(text, mode="eval").body))
        except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluated(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluated(key): _evaluated(value) for key, value in pairs if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
    raise ValueError(f"{type(node).__name__} is no literal")


PYTHONIC = partial(Pythonic, PythonMarks())
LLAMA4_PYTHONIC = partial(Pythonic, PythonMarks(("<|python_start|>",), ("<|python_end|>",)))
LFM2 = partial(Pythonic, PythonMarks(("<|tool_call_start|>",), ("<|tool_call_end|>",)))
OLMO3 = partial(Pythonic, PythonMarks(("<function_calls>",), ("</function_calls>",), lines=True))
