"""Tool calls that a model chooses to write, held to the schemas of their tools."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls whose arguments are JSON."""

    call: str
    """One call, with NAME and ARGUMENTS in their places."""
    before: str = ""
    """What stands before the first, if anything does."""
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
"""By the parser that reads them. The others' calls cannot be told from text by how they begin, or have their
arguments in another shape than JSON."""

_PLACES = re.compile(r"(NAME|ARGUMENTS|DIGITS)")


def calls_grammar(
    format: CallFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    instead: Mapping[str, Any] | None = None,
) -> str:
    """Lark: free text in which a call, once begun, is one of these tools with arguments of its schema; or in
    place of the text JSON of the schema `instead`. Marks that are special tokens are no text to a grammar."""
    marks = {token.content: id for id, token in tokenizer.added_tokens.items() if tokenizer.is_special(id)}
    calls = " | ".join(f"call_{place}" for place in range(len(schemas)))
    rules = [
        f"call_{place}: {_sequence(_cut(format.call, first=not format.before), marks, name, schema)}"
        for place, (name, schema) in enumerate(schemas.items())
    ]
    opening = format.before or _first(format.call)
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


def _first(call: str) -> str:
    """The mark that a call begins with."""
    return call[: call.index(">") + 1]


def _cut(call: str, *, first: bool) -> str:
    """The call without its first mark, which was written already."""
    return call.removeprefix(_first(call)) if first else call


def _sequence(text: str, marks: Mapping[str, int], name: str = "", schema: Any = None) -> str:
    """Text as a sequence of tokens, literals, and what stands in its places."""
    found = "|".join(map(re.escape, sorted((mark for mark in marks if mark in text), key=len, reverse=True)))
    parts = re.split(f"({found})", text) if found else [text]
    out: list[str] = []
    for part in parts:
        if part in marks:
            out.append(f"<[{marks[part]}]>")
            continue
        for piece in _PLACES.split(part):
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
