"""Tests of the grammars of optional tool calls, in every format that has one."""

import json
import random
import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, byte_tokenizer
from tokenizers import AddedToken

from quire.configure import byte_vocabulary_of, vocabulary_of
from quire.data.output_pieces import ToolArguments, ToolStart
from quire.data.params import StructuredOutputsParams
from quire.errors import RequestError
from quire.text.grammar import Grammars
from quire.text.parsers import TOOLS
from quire.text.parsers.call_grammar import FORMATS, CallFormat, calls_grammar, format_of
from quire.text.tokenizer import Tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "days"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "any": {"type": "object"},
}
CALL = ("weather", {"city": "São Paulo", "days": 2})


@cache
def engine() -> FakeEngine:
    return FakeEngine("x")


def render(format: CallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return the text of tool calls, (name, arguments), in this format."""
    texts = []
    for name, arguments in calls:
        parameters = []
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text and not format.quotes else json.dumps(value, ensure_ascii=False)
            shown = format.string_mark + shown + format.string_mark if is_text else shown
            filled = format.parameter.replace("KEY", key).replace("IS_STRING", json.dumps(is_text))
            filled = filled.replace("TYPE", "string" if is_text else "object")
            parameters.append(filled.replace("VALUE", shown))
        text = format.call.replace("NAME", name).replace("DIGITS", "0")
        text = text.replace("HEADER", " <|constrain|>json")
        text = text.replace("PARAMETERS", format.separator.join(parameters))
        texts.append(text.replace("ARGUMENTS", json.dumps(arguments, ensure_ascii=False)))
    if format.repeats:
        return "".join(format.opening + text for text in texts)
    return format.opening + format.before + format.between.join(texts) + format.after


@cache
def tokenizer_of(format: CallFormat, special: bool) -> tuple[Tokenizer, Grammars]:
    """Return a tokenizer that has the marks of the format as tokens, and the grammars over its vocabulary."""
    backend = byte_tokenizer().backend
    parts = format.opening, format.call, format.after, format.string_mark, format.text_end, *format.free
    written = "".join(parts) + ("<|constrain|>" if "HEADER" in format.call else "")
    texts = dict.fromkeys(re.findall(r"\]<\]minimax\[>\[|<[^>=]+>", written))
    marks = [AddedToken(mark, special=special, normalized=False) for mark in texts]
    (backend.add_special_tokens if special else backend.add_tokens)(marks)
    tokenizer = Tokenizer(backend, special_tokens={}, chat_template="")
    vocabulary = vocabulary_of(tokenizer, len(tokenizer), (EOS,))
    return tokenizer, Grammars(lambda: vocabulary)


def accepts(format: CallFormat, text: str, *, special: bool = False, **options: Any) -> bool:
    tokenizer, grammars = tokenizer_of(format, special)
    grammar = calls_grammar(format, SCHEMAS, tokenizer, **options)
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.advance(id) != "error" for id in ids) and matcher.inner.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_parser_returns_the_calls_of_its_format(name: str) -> None:
    nested = {"k": {"a": 'x, "}y', "b": ["{"]}}
    pieces = TOOLS[name](schemas=SCHEMAS).parse(render(FORMATS[name], CALL, ("now", {}), ("any", nested)))
    starts = [piece.name for piece in pieces if isinstance(piece, ToolStart)]
    arguments = [
        json.loads(
            "".join(p.text for p in pieces if isinstance(p, ToolArguments) and p.index == index) or "{}"
        )
        for index in (0, 1, 2)
    ]
    assert (starts, arguments) == (["weather", "now", "any"], [CALL[1], {}, nested])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_grammar_accepts_calls_and_text(name: str, special: bool) -> None:
    """Catches a mark that is a special token but matched as text, which the grammar then never accepts."""
    format = FORMATS[name]
    lead = "Let me see. " if format.opening else ""
    optional = {"city": "x", "days": 1, "unit": "F", "place": {"x": 1.5}}
    for call in (CALL, ("weather", optional), ("now", {}), ("any", {"k": "v"})):
        assert accepts(format, lead + render(format, call), special=special), call
    assert accepts(format, render(format, CALL, ("now", {}), CALL), special=special)
    assert accepts(format, "Just text.", special=special) and accepts(format, "", special=special)


@pytest.mark.parametrize("name", FORMATS)
def test_grammar_refuses_other_arguments(name: str) -> None:
    format = FORMATS[name]
    for call in (
        ("later", {}),
        ("weather", {"city": "x"}),
        ("weather", {"city": "x", "days": [1]}),
        ("weather", {"city": "x", "days": 1, "unit": "K"}),
        ("weather", {"city": "x", "days": 1, "place": {"x": "far"}}),
    ):
        assert not accepts(format, render(format, call)), call


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].opening])
def test_json_instead_of_text(name: str) -> None:
    answer_schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(FORMATS[name], '{"a": 1}', answer_schema=answer_schema)
    assert accepts(FORMATS[name], render(FORMATS[name], CALL), answer_schema=answer_schema)
    assert not accepts(FORMATS[name], "Just text.", answer_schema=answer_schema)


def test_special_tokens_are_matched_by_id() -> None:
    """An opening mark that is typed as text opens no call."""
    tokenizer = engine().tokenizer
    grammar = calls_grammar(CallFormat("</s>", "NAME\nARGUMENTS", repeats=True), SCHEMAS, tokenizer)
    (end,) = (id for id, token in tokenizer.added_tokens.items() if token.content == "</s>")
    assert f"opening: <[{end}]>" in grammar and '"</s>"' not in grammar


@pytest.mark.parametrize("parser", TOOLS)
def test_every_parser_has_strict_tools(parser: str) -> None:
    """Three formats need special tokens, without which their marks cannot be told from text."""
    needed = {"openai": "<|message|>", "gigachat3": "<|function_call|>", "kimi_k3": "<|sep|>"}
    assert (format_of(parser, engine().tokenizer) is None) == (parser in needed)
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(needed.get(parser, "<tool_calls:opensource>"), special=True)])
    format = format_of(parser, Tokenizer(backend, special_tokens={}, chat_template=""))
    assert format is not None
    if parser == "hy_v3":
        calls = render(format, CALL)
        assert calls.count(":opensource>") == 13
        pieces = TOOLS[parser](schemas=SCHEMAS).parse(calls)
        assert [piece.name for piece in pieces if isinstance(piece, ToolStart)] == ["weather"]


def test_unknown_parser_has_no_format() -> None:
    assert format_of("", engine().tokenizer) is None


HEADERS = (
    "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|message|>{}<|call|>",
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.any "
    '<|message|>{"k": 1}<|call|>',
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
)


@pytest.mark.parametrize("text", HEADERS)
def test_messages_of_harmony(text: str) -> None:
    """Catches messages in channels that the grammar of strict tools does not accept, and calls in them that
    it does not constrain."""
    assert accepts(FORMATS["openai"], text, special=True)
    for old, new in (("functions.now", "functions.new"), ("{}", '{"x": 1}'), ('{"k": 1}', "[1]")):
        if old in text:
            assert not accepts(FORMATS["openai"], text.replace(old, new), special=True)


def test_size_of_the_grammar_is_limited() -> None:
    """Schemas with references could make the grammar as large as their parameters times their definitions."""
    properties = {f"p{index}": {"$ref": "#/$defs/large"} for index in range(300)}
    schema = {"type": "object", "properties": properties, "$defs": {"large": {"enum": ["x" * 10_000]}}}
    with pytest.raises(RequestError, match="more than 1,048,576 characters"):
        calls_grammar(FORMATS["qwen3_coder"], {"f": schema}, engine().tokenizer)
    many = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(3000)}}
    assert len(calls_grammar(FORMATS["pythonic"], {"f": many}, engine().tokenizer)) < 1 << 20


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_grammars_are_checked_by_bytes_alone(name: str, special: bool) -> None:
    """A server checks grammars over a vocabulary of bytes, which opens at once."""
    tokenizer, _ = tokenizer_of(FORMATS[name], special)
    grammars = Grammars(lambda: byte_vocabulary_of(tokenizer, len(tokenizer), (EOS,)))
    grammar = calls_grammar(FORMATS[name], SCHEMAS, tokenizer)
    grammars.check(StructuredOutputsParams(grammar=grammar))
    wrong: list[dict[str, Any]] = [
        {"grammar": "start: missing"},
        {"regex": "(a"},
        {"json": {"type": "string", "minLength": 2, "maxLength": 1}},
        {"regex": "[^\\s\\S]"},
    ]
    for params in wrong:
        with pytest.raises(RequestError):
            grammars.check(StructuredOutputsParams(**params))


BFCL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "live_parallel_3": [
        ("get_current_weather", {"location": "Cancún, QR", "unit": "celsius"}),
        ("get_current_weather", {"location": "Playa del Carmen, QR"}),
        ("get_current_weather", {"location": "Tulum, QR", "unit": ""}),
    ],
    "live_parallel_4": [
        ("get_current_weather", {"location": "Boston, USA", "url": "https://api.open-meteo.com/v1/forecast"})
    ],
    "live_parallel_11": [
        ("log_food", {"food_name": "frozen mango", "portion_amount": 8.0, "portion_unit": "piece"}),
        ("log_food", {"food_name": "chai tea", "portion_amount": 1.0, "meal_type": "snack"}),
    ],
    "live_parallel_15": [
        ("cmd_controller.execute", {"command": "dir c:\\"}),
        ("cmd_controller.execute", {"command": "echo.>C:\\testing.txt", "unit": "N/A"}),
    ],
    "simple_javascript_2": [
        (
            "extractLastTransactionId",
            {"filepath": "/var/log/db.log", "status": ["completed", "failed"], "encoding": "utf-8"},
        )
    ],
    "simple_javascript_3": [
        ("submitAtCoordinate", {"action": "submit", "formId": "loginForm", "coordinates": [60, 30]})
    ],
    "simple_javascript_5": [
        (
            "manageReactState",
            {
                "store": {
                    "initialState": "initialStateObject",
                    "middlewares": ["loggerMiddleware"],
                    "enhancers": ["applyMiddleware('myMiddleWare')"],
                },
                "context": "React.createContext()",
                "hooks": {"useStateSelector": "useStateSelectorHook"},
            },
        )
    ],
    "simple_javascript_12": [
        (
            "performDataFetch",
            {
                "apiEndpoint": "https://api.example.com/data",
                "requestConfig": {"method": "GET"},
                "expectedResponse": {"key": "value"},
                "handleErrors": True,
            },
        )
    ],
    "simple_javascript_13": [
        ("DynamicChartGenerator", {"userData": ["userDataArray"], "scalingFactor": 3.0, "options": {}})
    ],
    "simple_javascript_16": [
        ("rotateVertices", {"vertices": [[10.0, 15.0], [20.0, 25.0]], "pivot": [12.0, 17.0], "angle": 30.0})
    ],
    "simple_javascript_28": [
        ("filterBooksByAuthor", {"library": ["bookA", "bookB", "bookC"], "author": "J.K. Rowling"})
    ],
    "simple_javascript_43": [
        ("invokeCallback", {"callback": "processResult", "error": "null", "value": "Operation successful"})
    ],
    "simple_javascript_45": [
        ("Sde", {"t": "https://github.com/yarnpkg/berry", "e": {"startingCwd": "/home/user/projects"}})
    ],
    "simple_javascript_46": [("vOe", {"r": "packageInfo", "e": "version", "t": "1.2.3"})],
}
"""Calls of the Berkeley Function Calling Leaderboard, version 4 (Apache 2.0): those of its possible answers
with unusual names and values."""
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@pytest.mark.parametrize("name", FORMATS)
def test_published_calls_are_returned_and_follow_their_grammar(name: str) -> None:
    format, rng = FORMATS[name], random.Random(name)
    for case, calls in BFCL.items():
        schemas: dict[str, dict[str, Any]] = {}
        for function, arguments in calls:
            properties = schemas.setdefault(function, {"type": "object", "properties": {}})["properties"]
            properties |= {key: {"type": _TYPES[type(value)]} for key, value in arguments.items()}
        text = render(format, *calls)
        tokenizer, grammars = tokenizer_of(format, special=True)
        params = StructuredOutputsParams(grammar=calls_grammar(format, schemas, tokenizer))
        matcher = grammars.compile(params)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(matcher.advance(id) != "error" for id in ids) and matcher.inner.is_accepting(), case
        for num_cuts in (0, 1, 7, len(text) - 1):
            cuts = sorted(rng.sample(range(1, len(text)), num_cuts))
            parser = TOOLS[name](schemas=schemas, make_id=lambda index, function: str(index))
            parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
            pieces = [piece for part in parts for piece in parser.feed(part)] + parser.end()
            starts = [piece.name for piece in pieces if isinstance(piece, ToolStart)]
            returned = [
                json.loads(
                    "".join(p.text for p in pieces if isinstance(p, ToolArguments) and p.index == index)
                )
                for index in range(len(starts))
            ]
            assert list(zip(starts, returned, strict=True)) == calls, (case, parts)
