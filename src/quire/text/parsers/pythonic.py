"""Parser of tool calls written as Python: `[f(a=1), g(b="x")]`."""

import ast
import json
import re
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.text.parsers.calls import ToolParser, to_json
from quire.text.parsers.streaming import Wait

_FUNCTION = re.compile(r"[^\W\d][\w.-]*")
_LETTER = re.compile(r"[\w.-]")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonMarks:
    """Texts that mark the beginning and end of pythonic tool calls."""

    opens: tuple[str, ...] = ()
    """Marks before the calls; without marks, calls begin with a bracket."""
    closes: tuple[str, ...] = ()
    lines: bool = False
    """Whether each call is on its own line, without brackets around the calls."""


class Pythonic(ToolParser):
    """Parser of calls as Python. Each argument is emitted when it is complete."""

    keeps_special_tokens = True
    marks: PythonMarks

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
        prefix = "{"
        while (char := (yield from self.space())) and char != ")":
            argument = yield from self._argument()
            if argument is None:
                return False
            if prefix == "{":
                self.start(name)
            self.arguments(prefix + argument)
            prefix = ", "
            if (yield from self.space()) == ",":
                yield from self.take(",")
        if not (yield from self.take(")")):
            return False
        if prefix == "{":
            self.start(name)
        self.arguments("{}" if prefix == "{" else "}")
        return True

    def _argument(self) -> Wait[str | None]:
        """Read an argument `key=value` and return it as `"key": value` in JSON; None if it is not valid."""
        key = yield from self.word(_LETTER)
        yield from self.space()
        if not _FUNCTION.fullmatch(key) or not (yield from self.take("=")):
            return None
        source = yield from self._value()
        value = None if source is None else python_to_json(source)
        return None if value is None else f"{json.dumps(key, ensure_ascii=False)}: {value}"

    def _value(self) -> Wait[str | None]:
        """Read the source of a value, up to the comma or parenthesis after it; return None if incomplete."""
        parts: list[str] = []
        quote, depth = "", 0
        while char := (yield from self.peek()):
            if not quote and not depth and char in ",)":
                return "".join(parts)
            if quote and char == "\\":
                parts.append(char)
                self._position += 1
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
            self._position += 1
        return None


def python_to_json(source: str) -> str | None:
    """Return a Python literal as JSON, or None if the source is not a literal. The words true, false and null
    are literals, too."""
    # A line break inside of quotes is not valid Python, but is accepted.
    source = source.strip()
    for text in (source, source.replace("\r", "\\r").replace("\n", "\\n")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return to_json(_evaluate(ast.parse(text, mode="eval").body))
        except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluate(key): _evaluate(value) for key, value in pairs if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
    raise ValueError(f"{type(node).__name__} is not a literal")


PYTHONIC = partial(Pythonic, PythonMarks())
LLAMA4_PYTHONIC = partial(Pythonic, PythonMarks(("<|python_start|>",), ("<|python_end|>",)))
LFM2 = partial(Pythonic, PythonMarks(("<|tool_call_start|>",), ("<|tool_call_end|>",)))
OLMO3 = partial(Pythonic, PythonMarks(("<function_calls>",), ("</function_calls>",), lines=True))
