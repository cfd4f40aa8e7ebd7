"""Gemma's tool calls: `call:f{key:value}`, with marks in place of quotes."""

import json
import re
from dataclasses import dataclass
from functools import partial

from quire.text.parsers.calls import ToolParser, is_name, parse_json, to_json
from quire.text.parsers.json_text import SCALAR
from quire.text.parsers.pythonic import python_to_json
from quire.text.parsers.streaming import Wait

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_QUOTED = re.compile(r'("(?:[^"\\]|\\.?)*"?)', re.DOTALL)
"""Pattern of a string, or of the rest of a text after an unclosed quote: each character is scanned once."""


@dataclass(frozen=True)
class GemmaMarks:
    """Texts that mark calls and strings in one generation of Gemma models."""

    open: str
    close: str
    quote: str


class GemmaCalls(ToolParser):
    """Parser of Gemma's calls. Each argument is emitted when it is complete."""

    keeps_special_tokens = True
    marks: GemmaMarks

    def script(self) -> Wait[None]:
        while (yield from self.until((self.marks.open,), self.text)):
            self.hold()
            yield from self.take(self.marks.open)
            yield from self.space()
            if (yield from self.take("call:")) and (yield from self._call()):
                yield from self.closing((self.marks.close,))
            else:
                self.give_back()

    def _call(self) -> Wait[bool]:
        name = yield from self.header("{")
        if name is None or not is_name(name.strip()):
            return False
        yield from self.take("{")
        self.start(name.strip())
        self.arguments("{")
        comma = ""
        while (char := (yield from self.space())) and char != "}":
            key = yield from self.header(":")
            if key is None:
                return False
            yield from self.take(":")
            value = yield from self._value()
            if value is None:
                return False
            key = key.strip().removeprefix(self.marks.quote).removesuffix(self.marks.quote)
            if _STRING.fullmatch(key) and isinstance(name_in_json := parse_json(key), str):
                key = name_in_json
            self.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}")
            comma = ", "
            yield from self.take(",")
        self.arguments("}" if char else "")
        return bool((yield from self.take("}")))

    def _value(self) -> Wait[str | None]:
        """Return one value as JSON, up to the comma or brace that ends it; None if incomplete."""
        plain: list[str] = []
        depth = 0
        while True:
            mark = yield from self.until((self.marks.quote, *'"{}[],'), plain.append)
            if not mark:
                return None
            if mark == '"':  # models write strings of JSON, too
                before = "".join(plain).rstrip()
                if not before or (depth and before[-1] in "{[,:"):
                    yield from self._json_string(plain.append)
                else:
                    yield from self.take('"')
                    plain.append('"')
                continue
            if not depth and mark in "},":
                return _scalar("".join(plain))
            yield from self.take(mark)
            if mark != self.marks.quote:
                depth += (mark in "{[") - (mark in "}]")
                plain.append(mark)
                if depth < 0:
                    return None
                continue
            quoted = yield from self._quoted(",}]:" if depth else ",}]")
            if quoted is None:
                return None
            plain.append(json.dumps(quoted))

    def _quoted(self, followers: str) -> Wait[str | None]:
        """Return the text up to the mark that ends it, which is followed by one of the characters or the end
        of the output; None if it is incomplete. Other marks are quotes within the text."""
        parts: list[str] = []
        while (yield from self.until((self.marks.quote,), parts.append)):
            yield from self.take(self.marks.quote)
            self.hold()
            char = yield from self.space()
            self.go_back()
            if not char or char in followers:
                return "".join(parts)
            parts.append('"')
        return None


def _scalar(plain: str) -> str:
    """Return a value as JSON after adding missing quotes; as a string if it is still not valid."""
    plain = plain.strip()
    encoded = to_json(parse_json(_quote_keys(plain)))
    if plain[:1] in ("[", "{") and "'" in plain:
        encoded = python_to_json(plain) or encoded
    return json.dumps(plain, ensure_ascii=False) if encoded is None else encoded


def _quote_keys(plain: str) -> str:
    """Add quotes around keys and words outside of strings."""
    parts = _QUOTED.split(plain)
    return "".join(part if _STRING.fullmatch(part) else _quote_words(part) for part in parts)


def _quote_words(part: str) -> str:
    return re.sub(
        r"[^\s{}\[\],:]+", lambda word: word[0] if SCALAR.fullmatch(word[0]) else json.dumps(word[0]), part
    )


FUNCTION_GEMMA = partial(GemmaCalls, GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>"))
GEMMA4 = partial(GemmaCalls, GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>'))
