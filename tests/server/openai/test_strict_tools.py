"""Tests of the grammars of optional tool calls, in each call format."""

import re

import pytest
from fake_engine import EOS, byte_tokenizer
from tokenizers import AddedToken

from quire.configure import vocabulary_of
from quire.data.params import StructuredOutputsParams
from quire.server.openai.tools import FORMATS, calls_grammar
from quire.text.grammar import Grammars
from quire.text.parsers import answer_parser
from quire.text.tokenizer import Tokenizer

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"A": {"type": "integer"}},
    },
    "g": {"type": "object"},
}


def tokenizer_of(name: str, *, special: bool) -> Tokenizer:
    """Return a tokenizer with the markers of the format in its vocabulary."""
    backend = byte_tokenizer().backend
    written = FORMATS[name].before + FORMATS[name].call + FORMATS[name].after
    marks = [AddedToken(mark, special=special, normalized=False) for mark in re.findall("<[^>]+>", written)]
    (backend.add_special_tokens if special else backend.add_tokens)(marks)
    return Tokenizer(backend, special_tokens={}, chat_template="")


def call(name: str, function: str, arguments: str) -> str:
    text = FORMATS[name].call.replace("NAME", function).replace("ARGUMENTS", arguments)
    return text.replace("DIGITS", "0")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_started_call_must_be_valid_and_text_is_free(name: str, special: bool) -> None:
    """Catches a marker that is a special token, which no text of a grammar matches."""
    tokenizer = tokenizer_of(name, special=special)
    vocabulary = vocabulary_of(tokenizer, len(tokenizer), (EOS,))
    grammars = Grammars(lambda: vocabulary)

    def fits(text: str, instead: dict[str, str] | None = None) -> bool:
        grammar = calls_grammar(FORMATS[name], SCHEMAS, tokenizer, instead=instead)
        matcher = grammars.compile(StructuredOutputsParams(grammar=grammar))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return all(matcher.advance(id) != "error" for id in ids) and matcher.inner.is_accepting()

    before, after = FORMATS[name].before, FORMATS[name].after
    good, other = call(name, "f", '{"a": 1}'), call(name, "g", '{"b": "x"}')
    assert fits(f"Let me see. {before}{good}{after}") and fits(f"{before}{good}{other}{after} So.")
    assert fits("No call at all: {}")
    assert not fits(before + call(name, "f", '{"a": "1"}') + after)
    assert not fits(before + call(name, "h", "{}") + after)
    assert fits(before + good + after, {"type": "null"}) and fits("null", {"type": "null"})
    assert not fits("Text.", {"type": "null"})
    pieces = answer_parser(tools=name).parse(before + good + other + after)
    assert [getattr(piece, "name", "") for piece in pieces] == ["f", "", "g", ""]
