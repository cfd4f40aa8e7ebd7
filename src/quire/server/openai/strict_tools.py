"""Grammars of optional tool calls that match the schemas of their tools."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a model's tool calls with JSON arguments."""

    call: str
    """One call, with the placeholders NAME and ARGUMENTS."""
    before: str = ""
    """Text before the first call, if any."""
    after: str = ""


_HERMES = CallFormat('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>')
FORMATS = {
    "hermes": _HERMES,
    "granite4": _HERMES,
    "longcat": CallFormat(
        '<longcat_tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</longcat_tool_call>'
    ),
    "deepseek_v31": CallFormat(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": CallFormat(
        "<|tool_call_begin|>functions.NAME:DIGITS<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
}
"""Call formats by parser name. Calls of other parsers have no distinct start mark, or no JSON arguments."""

_PLACEHOLDERS = re.compile(r"(NAME|ARGUMENTS|DIGITS)")


def calls_grammar(
    format: CallFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    instead: Mapping[str, Any] | None = None,
) -> str:
    """Return a Lark grammar of free text, or of JSON of the schema `instead`, with tool calls. Every call is
    one of these tools with arguments of its schema. Marks that are special tokens are matched by token id."""
    marks = {token.content: id for id, token in tokenizer.added_tokens.items() if tokenizer.is_special(id)}
    calls = " | ".join(f"call_{place}" for place in range(len(schemas)))
    rules = [
        f"call_{place}: {_sequence(_after_mark(format.call, first=not format.before), marks, name, schema)}"
        for place, (name, schema) in enumerate(schemas.items())
    ]
    opening = format.before or _start_mark(format.call)
    if opening in marks:
        rules += [f"opening: <[{marks[opening]}]>", "begun: TEXT opening"]
    else:
        rules += [f"opening: {_literal(opening)}", f"begun[lazy]: TEXT {_literal(opening)}"]
    between = "" if format.before else "opening "
    body = f"({calls}) (SPACE? {between}({calls}))*"
    if format.before:
        body += f" {_sequence(format.after, marks)}"
    start = f"(begun {body})* TEXT" if instead is None else f"{_json(instead)} | opening {body}"
    return "\n".join([f"start: {start}", *rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]+/", ""])


def _start_mark(call: str) -> str:
    """Return the start mark of a call."""
    return call[: call.index(">") + 1]


def _after_mark(call: str, *, first: bool) -> str:
    """Return the call, if `first` without its start mark, which was matched already."""
    return call.removeprefix(_start_mark(call)) if first else call


def _sequence(text: str, marks: Mapping[str, int], name: str = "", schema: Any = None) -> str:
    """Convert text to grammar symbols: special tokens, literals and filled placeholders."""
    pattern = "|".join(
        map(re.escape, sorted((mark for mark in marks if mark in text), key=len, reverse=True))
    )
    parts = re.split(f"({pattern})", text) if pattern else [text]
    out: list[str] = []
    for part in parts:
        if part in marks:
            out.append(f"<[{marks[part]}]>")
            continue
        for piece in _PLACEHOLDERS.split(part):
            if piece == "ARGUMENTS":
                out.append(_json(schema))
            elif piece == "NAME":
                out.append(_literal(name))
            elif piece == "DIGITS":
                out.append("/[0-9]+/")
            elif piece:
                out.append(_literal(piece))
    return " ".join(out)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"
