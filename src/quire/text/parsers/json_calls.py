"""Parsers of tool calls that are JSON objects, with or without marks, or forced by a grammar."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.text.parsers.calls import INVALID, ToolParser, is_name, mistral_id, parse_json, to_json
from quire.text.parsers.streaming import Wait

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OTHERS = ("id", "type", "tool_call_id")


@dataclass(frozen=True)
class JsonMarks:
    """Texts that mark the beginning and end of JSON tool calls."""

    opens: tuple[str, ...]
    """Marks that precede the calls. A bracket in place of a mark is also the first character of the JSON."""
    closes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    """Marks around plain text, which are removed."""
    by_name: bool = False
    """Whether the object has the form `{name: arguments}`."""
    special: bool = False


class ObjectParser(ToolParser):
    """Base of parsers that read calls from JSON objects."""

    by_name = False

    def objects(self) -> Wait[bool]:
        """Read one call, several calls, or a list of calls. Return False if the first object is not a call,
        or if a call is incomplete."""
        is_list = (yield from self.space()) == "["
        if is_list:
            yield from self.take("[")
        while (yield from self.space()) == "{" and (yield from self._object()):
            self.hold()
            yield from self.space()
            yield from self.take(",", ";")
            if (yield from self.space()) != "{":
                self.go_back()
                yield from self.space()
                if is_list:
                    yield from self.take("]")
                return True
        return False

    def _object(self) -> Wait[bool]:
        """Read one call; return False if it is invalid or incomplete. The start of the call is emitted when
        its name is known and its arguments begin."""
        yield from self.take("{")
        name, arguments, started = "", "{}", False
        while (key := (yield from self._key())) is not None:
            if self.by_name or (key in _ARGUMENTS and name):
                name = key if self.by_name else name
                if not is_name(name) or not (yield from self._arguments(name)):
                    return False
                started = True
            else:
                value = yield from self._read_value()
                if key in _ARGUMENTS:
                    arguments = _unpack(value)
                known = key in _NAMES or key in _ARGUMENTS or key in _OTHERS
                if value is INVALID or not arguments or not (known or name):
                    return False
                name = value if key in _NAMES and isinstance(value, str) else name
            yield from self.space()
            end = yield from self.take(",", "}")
            if end == "}" and not started and is_name(name):
                self.start(name)
                self.arguments(arguments)
                started = True
            if end != ",":
                return started and end == "}"
        return False

    def _key(self) -> Wait[str | None]:
        """Read a key and its colon; return None if they are invalid."""
        if (yield from self.space()) != '"':
            return None
        key = yield from self._read_value()
        yield from self.space()
        colon = yield from self.take(":")
        return key if isinstance(key, str) and colon else None

    def _read_value(self) -> Wait[Any]:
        """Read a whole value, which is not streamed; return INVALID if it is incomplete or invalid."""
        parts: list[str] = []
        is_complete = yield from self.json_value(parts.append)
        return parse_json("".join(parts)) if is_complete else INVALID

    def _arguments(self, name: str) -> Wait[bool]:
        """Emit the start of the call and stream its arguments, an object; an object inside of a string is
        emitted at once. Return False if the arguments are invalid or incomplete."""
        if (yield from self.space()) == "{":
            self.start(name)
            return (yield from self.json_value(self.arguments))
        arguments = _unpack((yield from self._read_value()))
        if arguments:
            self.start(name)
            self.arguments(arguments)
        return bool(arguments)


def _unpack(value: Any) -> str:
    """Return the arguments of a call, an object or a string with one, as JSON; empty for other values."""
    value = parse_json(value) if isinstance(value, str) else value
    if value is None:
        return "{}"
    return to_json(value) or "" if isinstance(value, dict) else ""


class JsonCalls(ObjectParser):
    """Parser of calls that are JSON objects between configured marks."""

    marks: JsonMarks

    def __init__(self, marks: JsonMarks, **options: Any) -> None:
        self.by_name = marks.by_name
        self.keeps_special_tokens = marks.special
        super().__init__(marks, **options)

    def script(self) -> Wait[None]:
        opens = tuple(mark for mark in self.marks.opens if mark not in ("{", "["))
        while mark := (yield from self.until((*self.marks.opens, *self.marks.dropped), self.text)):
            if mark in self.marks.dropped:
                yield from self.take(mark)
                continue
            self.hold()
            while (yield from self.take(*opens)):
                yield from self.space()
            num_calls = self._num_calls
            if (yield from self.objects()) or self._num_calls > num_calls:
                yield from self._stray_brackets()
                yield from self.closing(self.marks.closes)
            else:
                self.give_back()

    def _stray_brackets(self) -> Wait[None]:
        """Skip superfluous closing brackets before a closing mark, which models write at times."""
        self.hold()
        while (yield from self.space()) and (yield from self.take("}", "]")):
            pass
        if (yield from self.take(*self.marks.closes)):
            self.release()
        else:
            self.go_back()


class Mistral(ObjectParser):
    """Parser of Mistral's calls: `[TOOL_CALLS]`, then a list of objects, or a name and its arguments."""

    default_id = staticmethod(mistral_id)
    keeps_special_tokens = True

    def script(self) -> Wait[None]:
        while (yield from self.until(("[TOOL_CALLS]",), self.text)):
            self.hold()
            yield from self.take("[TOOL_CALLS]")
            char = yield from self.space()
            if not (yield from (self.objects() if char in ("[", "{") else self._named())):
                self.give_back()

    def _named(self) -> Wait[bool]:
        header = yield from self.header("{")
        if header is None:
            return False
        name, _, id_ = header.removesuffix("[ARGS]").strip().partition("[CALL_ID]")
        if not is_name(name):
            return False
        self.start(name, id_ or None)
        return (yield from self.json_value(self.arguments))


class RequiredCalls(ObjectParser):
    """Parser of calls that a grammar forces: a list of `{"name", "parameters"}`. If no call is read, the
    output is text; text after the last call is dropped."""

    def script(self) -> Wait[None]:
        self.hold()
        is_complete = yield from self.objects()
        if not is_complete and self._num_calls == 0:
            self.give_back()
            yield from self.until((), self.text)
        self.release()
        yield from self.until((), lambda text: None)


class NamedCall(ToolParser):
    """Parser of a call that a grammar forces: the whole output is the arguments of one function."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        super().__init__(**options)

    def script(self) -> Wait[None]:
        if (yield from self.space()):
            self.start(self.name)
            yield from self.until((), self.arguments)


def _calls(*opens: str, **options: Any) -> partial[JsonCalls]:
    return partial(JsonCalls, JsonMarks(opens, **options))


HERMES = _calls("<tool_call>", closes=("</tool_call>",), special=True)
LLAMA_JSON = _calls("<|python_tag|>", "[", "{", special=True)
GRANITE = _calls("<|tool_call|>", "<tool_call>", closes=("</tool_call>",), special=True)
GRANITE_20B = _calls("<function_call>", closes=("</function_call>",), special=True)
INTERNLM = _calls(
    "<|action_start|><|plugin|>", "<|action_start|> <|plugin|>", closes=("<|action_end|>",), special=True
)
TOOL_CALLS = _calls("<tool_calls>", closes=("</tool_calls>",), special=True)
PHI4_MINI = _calls("functools")
XLAM = _calls(
    "<tool_call>", "[TOOL_CALLS]", "```json", "[", "{", closes=("</tool_call>", "[/TOOL_CALLS]", "```")
)
ERNIE45 = _calls(
    "<tool_call>",
    closes=("</tool_call>",),
    dropped=("<response>\n", "<response>", "\n</response>\n", "\n</response>"),
)
LONGCAT = _calls("<longcat_tool_call>", closes=("</longcat_tool_call>",))
APERTUS = _calls("<|tools_prefix|>", closes=("<|tools_suffix|>",), by_name=True, special=True)
COHERE = _calls(
    "<|START_ACTION|>",
    closes=("<|END_ACTION|>",),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    special=True,
)
GIGACHAT3 = _calls("function call<|role_sep|>", "<|function_call|>", special=True)
