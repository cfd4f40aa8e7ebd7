"""Tests of single formats: parameter types, key order, ids, repairs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.errors import ConfigError
from quire.text.parsers import REASONING, TOOLS, answer_parser, load_plugin
from quire.text.parsers.calls import typed
from quire.text.parsers.streaming import join

SCHEMA = {"f": {"properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"}}}}


def parsed(name: str, text: str) -> list[Piece]:
    made = TOOLS[name](schemas=SCHEMA, make_id=lambda index, function: str(index))
    pieces: list[Piece] = made.parse(text)
    return pieces


def arguments(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ToolArguments))


def test_arguments_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert parsed("hermes", text) == [ToolStart(0, "0", "f"), ToolArguments(0, '{"a": 1}')]


@pytest.mark.parametrize(
    ("value", "expected"),
    [('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), ("{}", "{}"), ('{"a":1}', '{"a":1}')],
)
def test_arguments_of_other_types(value: str, expected: str) -> None:
    assert arguments(parsed("hermes", f'<tool_call>{{"name": "f", "arguments": {value}}}')) == expected


@pytest.mark.parametrize("value", ["5", '"no object"', "[1]", "oops"])
def test_arguments_that_are_not_an_object_stay_text(value: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>'
    assert parsed("hermes", text) == [TextPiece(text)]


def test_missing_arguments_are_an_empty_object() -> None:
    assert arguments(parsed("hermes", '<tool_call>{"name": "f"}</tool_call>')) == "{}"


def test_invalid_string_escapes_are_repaired() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t\\d \\\' \x01 \\u00e9 \\u1x"}}</tool_call>'
    assert json.loads(arguments(parsed("hermes", text))) == {"a": "1\n2\t\\d ' \x01 é \\u1x"}


def test_broken_arguments_end_at_the_error() -> None:
    pieces = parsed("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> end')
    assert pieces[0] == ToolStart(0, "0", "f")
    assert pieces[1:] == [ToolArguments(0, '{"a": '), TextPiece("oops}}</tool_call> end")]


def test_deep_nesting_does_not_overflow() -> None:
    deep = "[" * 5000 + "]" * 5000
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
    assert arguments(parsed("hermes", text)) == f'{{"a": {deep}}}'
    for name in ("pythonic", "qwen3_coder"):
        for value in (deep, "1" * 5000):
            parsed(name, f"[f(a={value})]")
            parsed(name, f"<function=f><parameter=o>{value}</parameter></function>")


def test_missing_end_tags_of_parameters() -> None:
    text = "<tool_call><function=f><parameter=s>\nx\n<parameter=i>\n5\n</function></tool_call>"
    assert arguments(parsed("qwen3_coder", text)) == '{"s": "x", "i": 5}'


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"integer"}, 5),
        ("5.5", {"number"}, 5.5),
        ("five", {"integer"}, "five"),
        ("True", {"boolean"}, True),
        ("None", {"string", "null"}, None),
        ("5", {"string", "null"}, "5"),
        ("{'a': 1, 'b': (1, 2)}", {"object"}, {"a": 1, "b": [1, 2]}),
        ('{"a": 1', {"object"}, '{"a": 1'),
        ("NaN", {"number"}, "NaN"),
        ("{1, 2}", {"array"}, "{1, 2}"),
        ("[1]", set(), [1]),
        ("word", set(), "word"),
        (" kept ", {"string", "null"}, " kept "),
        ("9" * 5000, {"integer"}, "9" * 5000),
    ],
)
def test_types_come_from_the_schema(text: str, types: set[str], expected: Any) -> None:
    assert json.loads(typed(text, frozenset(types))) == expected


@pytest.mark.parametrize("schema", [{"type": 5}, True, {"anyOf": "x"}, {"enum": 3}, {"$ref": "#/x"}, None])
def test_invalid_schemas_are_ignored(schema: Any) -> None:
    made = TOOLS["qwen3_coder"](schemas={"f": {"properties": {"a": schema}}})
    text = "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>"
    assert arguments(made.parse(text)) == '{"a": "x"}'


@pytest.mark.parametrize("schema", [{}, {"$ref": "#/$defs/o"}, {"description": "any"}])
def test_parameter_without_a_type_is_json_if_possible(schema: dict[str, Any]) -> None:
    made = TOOLS["qwen3_coder"](schemas={"f": {"properties": {"a": schema}}})
    for value, expected in (('{"x": 1}', '{"a": {"x": 1}}'), ("word", '{"a": "word"}')):
        text = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        assert arguments(made.parse(text)) == expected
        made = TOOLS["qwen3_coder"](schemas={"f": {"properties": {"a": schema}}})


def test_tool_call_ids_have_the_expected_format() -> None:
    forms = {
        "hermes": ('<tool_call>{"name": "f"}</tool_call>', r"chatcmpl-tool-[0-9a-f]{32}"),
        "mistral": ("[TOOL_CALLS]f{}", r"[0-9a-zA-Z]{9}"),
        "kimi_k2": ("<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}", r"functions\.f:3"),
    }
    for name, (text, form) in forms.items():
        start = TOOLS[name]().parse(text)[0]
        assert isinstance(start, ToolStart)
        assert re.fullmatch(form, start.id)


def test_mistral_may_generate_the_id() -> None:
    assert parsed("mistral", "[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}")[0] == ToolStart(0, "abc123XYZ", "f")


def test_python_values() -> None:
    pieces = parsed("pythonic", "[f(a=None, b=true, c=-1.5, d={'x': (1,)}, e='it\\'s', g=\"1\n2\")]")
    expected = {"a": None, "b": True, "c": -1.5, "d": {"x": [1]}, "e": "it's", "g": "1\n2"}
    assert json.loads(arguments(pieces)) == expected


@pytest.mark.parametrize("text", ["[f(x)]", "[f(a=g())]", "[f(a=b)]", "[f(a=1", "[f]", "[f(a=]", "[1.f()]"])
def test_python_without_literal_call_stays_text(text: str) -> None:
    assert parsed("pythonic", text) == [TextPiece(text)]


def test_harmony_has_reasoning_calls_and_text() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me."
        "<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    call: list[Piece] = [ToolStart(0, "x", "f"), ToolArguments(0, "{}")]
    whole = answer_parser(reasoning="openai_gptoss", tools="openai", make_id=lambda index, name: "x")
    assert whole.parse(text) == [ReasoningPiece("Think."), TextPiece("Let me."), *call, TextPiece("Done.")]
    alone = answer_parser(reasoning="openai_gptoss").parse(text)
    assert alone == [ReasoningPiece("Think."), TextPiece("Let me.{}Done.")]


@pytest.mark.parametrize(
    ("body", "expected", "rest"),
    [
        ("", "{}", ""),
        ('{"a": 3', '{"a": 3', ""),
        ('{"a": oops}', '{"a": ', "oops}"),
        ("{} x", "{}", "x"),
        ("x", "", "x"),
    ],
)
def test_harmony_with_odd_arguments(body: str, expected: str, rest: str) -> None:
    pieces = parsed("openai", f"<|channel|>commentary to=functions.f<|message|>{body}<|call|>")
    assert arguments(pieces) == expected
    assert [piece.text for piece in pieces if isinstance(piece, TextPiece)] == ([rest] if rest else [])


def test_harmony_continues_where_the_prompt_ends() -> None:
    pieces = parsed("openai", ' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>')
    assert pieces == [ToolStart(0, "0", "f"), ToolArguments(0, '{"a": 1}')]


def test_muse_glimmer_has_recipients() -> None:
    text = (
        " to=self<|message|>Think.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n"
        '<atem:invoke name="f"><atem:parameter name="i">3</atem:parameter></atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done.<|eot|>"
    )
    call: list[Piece] = [ToolStart(0, "x", "f"), ToolArguments(0, '{"i": 3}')]
    names = {"reasoning": "muse_glimmer", "tools": "muse_glimmer"}
    for step in (1, 2, 3, len(text)):
        whole = answer_parser(**names, schemas=SCHEMA, make_id=lambda index, name: "x")
        parts = [text[start : start + step] for start in range(0, len(text), step)]
        pieces = join([piece for part in parts for piece in whole.feed(part)] + whole.end())
        assert pieces == [ReasoningPiece("Think."), *call, TextPiece("Done.")]
    alone = answer_parser(reasoning="muse_glimmer").parse(text)
    assert alone[0] == ReasoningPiece("Think.") and "<atem:invoke" in alone[1].text


def test_inkling_has_thinking_calls_and_text() -> None:
    text = (
        "<|content_thinking|>Think.<|end_message|><|message_model|>f<|content_invoke_tool_json|>"
        '{"name": "f", "args": {}}<|end_message|><|message_model|><|content_text|>Done.<|end_message|>'
        "<|message_model|>Bare.<|content_model_end_sampling|>"
    )
    call: list[Piece] = [ToolStart(0, "x", "f"), ToolArguments(0, "{}")]
    for size in (1, 5, 500):
        made = answer_parser(reasoning="inkling", tools="inkling", make_id=lambda index, name: "x")
        pieces = [
            piece for start in range(0, len(text), size) for piece in made.feed(text[start : start + size])
        ]
        assert join(pieces + made.end()) == [ReasoningPiece("Think."), *call, TextPiece("Done.Bare.")]
    alone = answer_parser(reasoning="inkling").parse(text)
    assert alone == [ReasoningPiece("Think."), TextPiece('{"name": "f", "args": {}}Done.Bare.')]


def test_reasoning_comes_before_calls() -> None:
    made = answer_parser(reasoning="qwen3", tools="hermes", make_id=lambda index, name: "x")
    text = '<think>\nA <tool_c> B</think>\n\n<tool_call>{"name": "f"}</tool_call>'
    call: list[Piece] = [ToolStart(0, "x", "f"), ToolArguments(0, "{}")]
    assert made.parse(text) == [ReasoningPiece("\nA <tool_c> B"), *call]
    one = answer_parser(reasoning="qwen3", tools="hermes", make_id=lambda index, name: "x")
    pieces = [piece for char in text for piece in one.feed(char)] + one.end()
    assert "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)) == "\nA <tool_c> B"
    assert [piece for piece in pieces if isinstance(piece, ToolStart)] == [call[0]]
    assert not [piece for piece in pieces if isinstance(piece, TextPiece)]


def test_plugin_registers_its_parsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOOLS, "entries", dict(TOOLS.entries))
    monkeypatch.setattr(REASONING, "entries", dict(REASONING.entries))
    path = tmp_path / "mine.py"
    path.write_text(
        "from quire.text.parsers import reasoning_parser, tool_parser\n"
        "from quire.text.parsers.calls import ToolParser\n"
        "from quire.text.parsers.reasoning import Identity\n"
        "@tool_parser('shout')\n"
        "class Shout(ToolParser):\n"
        "    def script(self):\n"
        "        while (yield from self.until(('!',), self.text)):\n"
        "            yield from self.take('!')\n"
        "            self.start('shout')\n"
        "@reasoning_parser('mute')\n"
        "class Mute(Identity): pass\n"
    )
    load_plugin(path)
    pieces = answer_parser(reasoning="mute", tools="shout", make_id=lambda index, name: "x").parse("a!")
    assert pieces == [TextPiece("a"), ToolStart(0, "x", "shout")]
    with pytest.raises(ConfigError, match="no parser plugin"):
        load_plugin(tmp_path / "none.py")


def test_unknown_parser_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown tool parser 'herpes'; known: apertus, "):
        TOOLS["herpes"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "\\ud800é"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800é\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800é"}}</tool_call>'),
        ("pythonic", '[f(a="\\ud800é")]'),
        ("gemma4", '<|tool_call>call:f{a:"\\ud800é"}<tool_call|>'),
        ("qwen3_coder", '<function=f><parameter=a>"\\ud800é"</parameter></function>'),
    ],
)
def test_lone_surrogate_stays_escaped(name: str, text: str) -> None:
    result = arguments(parsed(name, text))
    assert json.loads(result.encode()) == {"a": "\ud800é"}


def test_lone_surrogate_in_a_name_is_refused() -> None:
    text = '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'
    assert parsed("hermes", text) == [TextPiece(text)]
