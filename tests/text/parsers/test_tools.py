"""Tests of every tool parser on calls in the format of its models: complete, in pieces, truncated, and
broken."""

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.data.output_pieces import Piece, TextPiece, ToolArguments, ToolStart
from quire.text.parsers import REASONING, TOOLS
from quire.text.parsers.streaming import Parser, join

Call = tuple[str, dict[str, Any]]
Writer = Callable[[list[Call]], str]

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "list": {"type": ["array", "null"]},
            "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
CALLS: dict[str, list[Call]] = {
    "one": [("get_weather", {"city": "Paris", "days": 3})],
    "none": [("now", {})],
    "several": [("get_weather", {"city": "Paris"}), ("now", {}), ("get_weather", {"days": -2, "share": 0.5})],
    "nested": [
        ("get_weather", {"where": {"a": [1, {"b": None}], "c": {"d": True}}, "list": [[1], {"e": 2}, "x"]})
    ],
    "unicode": [("get_weather", {"city": "Zürich 中文 🙂 \u2028"})],
    "marks": [("get_weather", {"city": "a \"quoted\" {brace} [x] 'y', (z) \\ end", "exact": False})],
}
LINES: list[Call] = [("get_weather", {"city": "def f():\n    return 1\n\n# end", "days": 1})]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(arguments: str = "arguments", name: str = "name") -> Callable[[list[Call]], list[str]]:
    return lambda calls: [dumps({name: function, arguments: values}) for function, values in calls]


def one_by_one(before: str, after: str = "", arguments: str = "arguments", between: str = "\n") -> Writer:
    return lambda calls: between.join(before + one + after for one in objects(arguments)(calls))


def listed(before: str, after: str = "", arguments: str = "arguments", name: str = "name") -> Writer:
    return lambda calls: f"{before}[{', '.join(objects(arguments, name)(calls))}]{after}"


def python(before: str = "[", between: str = ", ", after: str = "]") -> Writer:
    def call(function: str, values: dict[str, Any]) -> str:
        return f"{function}({', '.join(f'{key}={value!r}' for key, value in values.items())})"

    return lambda calls: before + between.join(call(*one) for one in calls) + after


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def function_tags(open_: str, close: str) -> Writer:
    def call(function: str, values: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in values.items())
        return f"{open_}\n<function={function}>\n{inner}</function>\n{close}"

    return lambda calls: "\n".join(call(*one) for one in calls)


def invoke_tags(open_: str, close: str, prefix: str = "", typed: bool = False, wrap: str = "{}") -> Writer:
    def call(function: str, values: dict[str, Any]) -> str:
        inner = "".join(
            f'<{prefix}parameter name="{key}"'
            + (f' string="{str(isinstance(value, str)).lower()}"' if typed else "")
            + f">{raw(value)}</{prefix}parameter>\n"
            for key, value in values.items()
        )
        return wrap.format(f'<{prefix}invoke name="{function}">\n{inner}</{prefix}invoke>')

    return lambda calls: f"{open_}\n" + "\n".join(call(*one) for one in calls) + f"\n{close}"


def glm(between: str) -> Writer:
    def call(function: str, values: dict[str, Any]) -> str:
        pairs = [f"<arg_key>{k}</arg_key>{between}<arg_value>{raw(v)}</arg_value>" for k, v in values.items()]
        return f"<tool_call>{between.join([function, *pairs])}{between}</tool_call>"

    return lambda calls: "\n".join(call(*one) for one in calls)


def named(section: tuple[str, str], call: str) -> Writer:
    def write(calls: list[Call]) -> str:
        inner = [
            call.replace("NAME", n).replace("I", str(i), 1) if "I" in call else call.replace("NAME", n)
            for i, (n, _) in enumerate(calls)
        ]
        filled = [one.replace("ARGS", dumps(values)) for one, (_, values) in zip(inner, calls, strict=True)]
        return section[0] + "\n".join(filled) + section[1]

    return write


def kimi(calls: list[Call]) -> str:
    inner = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(values)}<|tool_call_end|>"
        for index, (name, values) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(inner) + "<|tool_calls_section_end|>"


def gemma(open_: str, close: str, quote: str) -> Writer:
    def value(of: Any) -> str:
        if isinstance(of, str):
            return f"{quote}{of}{quote}"
        if isinstance(of, dict):
            return "{" + ",".join(f"{key}:{value(one)}" for key, one in of.items()) + "}"
        return "[" + ",".join(map(value, of)) + "]" if isinstance(of, list) else dumps(of)

    return lambda calls: "".join(f"{open_}call:{name}{value(values)}{close}" for name, values in calls)


def kimi_k3(calls: list[Call]) -> str:
    def call(index: int, function: str, values: dict[str, Any]) -> str:
        inner = "".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"<|sep|>'
            f"{raw(value)}<|close|>argument<|sep|>"
            for key, value in values.items()
        )
        return f'<|open|>call tool="{function}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'

    inner = "".join(call(index, *one) for index, one in enumerate(calls))
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def minicpm(calls: list[Call]) -> str:
    def value(of: Any) -> str:
        return f"<![CDATA[{of}]]>" if isinstance(of, str) else dumps(of)

    def call(function: str, values: dict[str, Any]) -> str:
        inner = "".join(f'<param name="{key}">{value(one)}</param>' for key, one in values.items())
        return f'<function name="{function}">{inner}</function>'

    return "<|tool_call_start|>" + "\n".join(call(*one) for one in calls) + "<|tool_call_end|>"


def hunyuan(suffix: str) -> Writer:
    def call(function: str, values: dict[str, Any]) -> str:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in values.items()]
        return f"<tool_call>{function}<tool_sep>\n{''.join(pairs)}</tool_call>"

    def write(calls: list[Call]) -> str:
        text = "<tool_calls>\n" + "\n".join(call(*one) for one in calls) + "\n</tool_calls>"
        return re.sub(r"<(/?(?:tool|arg)_\w+)>", rf"<\1{suffix}>", text)

    return write


def minimax_m3(calls: list[Call]) -> str:
    def tag(key: str, of: Any) -> str:
        if isinstance(of, dict):
            inner = "".join(tag(*one) for one in of.items())
        else:
            inner = "".join(tag("item", one) for one in of) if isinstance(of, list) else raw(of)
        return f"]<]minimax[>[<{key}>{inner}]<]minimax[>[</{key}>"

    def call(function: str, values: dict[str, Any]) -> str:
        inner = "".join(tag(*one) for one in values.items())
        return f']<]minimax[>[<invoke name="{function}">{inner}]<]minimax[>[</invoke>'

    inner = "\n".join(call(*one) for one in calls)
    return f"]<]minimax[>[<tool_call>\n{inner}\n]<]minimax[>[</tool_call>"


def inkling(calls: list[Call]) -> str:
    return "".join(
        f"<|message_model|>{name}<|content_invoke_tool_json|>"
        f"{dumps({'name': name, 'args': values})}<|end_message|>"
        for name, values in calls
    )


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(values)}<|call|>"
        for name, values in calls
    )


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>"
HERMES = one_by_one("<tool_call>\n", "\n</tool_call>")
QWEN = function_tags("<tool_call>", "</tool_call>")
LLAMA = one_by_one("", between="; ", arguments="parameters")

WRITERS: list[tuple[str, Writer]] = [
    ("hermes", HERMES),
    ("granite4", HERMES),
    ("ernie45", HERMES),
    ("longcat", one_by_one("<longcat_tool_call>", "</longcat_tool_call>")),
    ("llama3_json", LLAMA),
    ("llama3_json", one_by_one("<|python_tag|>", arguments="parameters")),
    ("llama4_json", LLAMA),
    ("granite", listed("<|tool_call|>")),
    ("granite", listed("<tool_call>")),
    ("granite-20b-fc", one_by_one("<function_call> ")),
    ("internlm", one_by_one("<|action_start|><|plugin|>\n", "\n<|action_end|>", arguments="parameters")),
    ("jamba", listed("<tool_calls>", "</tool_calls>")),
    ("hunyuan_a13b", listed("<tool_calls>", "</tool_calls>")),
    ("minimax", lambda calls: "<tool_calls>\n" + one_by_one("")(calls) + "\n</tool_calls>"),
    ("phi4_mini_json", listed("functools")),
    ("xlam", listed("")),
    ("xlam", listed("```json\n", "\n```")),
    ("cohere_command3", listed("<|START_ACTION|>\n", "\n<|END_ACTION|>", "parameters", "tool_name")),
    ("gigachat3", one_by_one("function call<|role_sep|>\n")),
    (
        "apertus",
        lambda calls: f"<|tools_prefix|>[{', '.join(dumps({n: v}) for n, v in calls)}]<|tools_suffix|>",
    ),
    ("mistral", listed("[TOOL_CALLS] ")),
    ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}{dumps(v)}" for n, v in calls)),
    ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(v)}" for n, v in calls)),
    ("deepseek_v3", named(DEEPSEEK, V3)),
    ("deepseek_v31", named(DEEPSEEK, V31)),
    ("kimi_k2", kimi),
    ("qwen3_coder", QWEN),
    ("qwen3_xml", QWEN),
    ("mimo", QWEN),
    ("step3p5", QWEN),
    ("seed_oss", function_tags("<seed:tool_call>", "</seed:tool_call>")),
    ("muse_glimmer", invoke_tags("<atem:function_calls>", "</atem:function_calls>", "atem:")),
    ("minimax_m2", invoke_tags("<minimax:tool_call>", "</minimax:tool_call>")),
    (
        "deepseek_v32",
        invoke_tags("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", typed=True),
    ),
    ("deepseek_v4", invoke_tags("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)),
    (
        "step3",
        invoke_tags(
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "steptml:",
            wrap="<｜tool_call_begin｜>function<｜tool_sep｜>{}<｜tool_call_end｜>",
        ),
    ),
    ("glm45", glm("\n")),
    ("glm47", glm("")),
    ("poolside_v1", glm("\n")),
    ("hy_v3", hunyuan("")),
    ("hy_v3", hunyuan(":opensource")),
    ("ling3", glm("\n")),
    ("kimi_k3", kimi_k3),
    ("minimax_m3", minimax_m3),
    ("inkling", inkling),
    ("minicpm5", minicpm),
    ("dots", invoke_tags("<dots_function_call>", "</dots_function_call>")),
    ("cohere_command4", listed("<|START_ACTION|>", "<|END_ACTION|>", "parameters", "tool_name")),
    ("pythonic", python()),
    ("llama4_pythonic", python()),
    ("llama4_pythonic", python("<|python_start|>[", after="]<|python_end|>")),
    ("lfm2", python("<|tool_call_start|>[", after="]<|tool_call_end|>")),
    ("olmo3", python("<function_calls>", "\n", "</function_calls>")),
    ("functiongemma", gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    ("gemma4", gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    ("openai", harmony),
]
each_writer = pytest.mark.parametrize(
    ("name", "write"), WRITERS, ids=[f"{name}-{at}" for at, (name, _) in enumerate(WRITERS)]
)


def parser(name: str) -> Parser:
    made = TOOLS[name](schemas=SCHEMAS, make_id=lambda index, function: f"{function}-{index}")
    assert isinstance(made, Parser)
    return made


def streamed(name: str, parts: list[str]) -> list[Piece]:
    one = parser(name)
    return join([piece for part in parts for piece in one.feed(part)] + one.end())


def splits(text: str, most: int = 15) -> Iterator[list[str]]:
    """Yield splits of a text into chunks: into characters, equal parts, two parts at every position (of a
    long text, at some), and many parts at random positions."""
    for size in (1, 3):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    step = max(1, len(text) // most)
    for cut in range(1 + len(text) % step, len(text), step):
        yield [text[:cut], text[cut:]]
    rng = random.Random(text)
    for num_cuts in (3, 8, len(text) // 4):
        cuts = sorted(rng.sample(range(1, len(text)), min(num_cuts, len(text) - 1)))
        yield [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def calls_of(pieces: list[Piece]) -> list[Call]:
    """Return the names and parsed arguments of the calls in these pieces."""
    starts = [piece for piece in pieces if isinstance(piece, ToolStart)]
    return [(start.name, json.loads(arguments_of(pieces, start.index))) for start in starts]


def arguments_of(pieces: list[Piece], index: int) -> str:
    return "".join(one.text for one in pieces if isinstance(one, ToolArguments) and one.index == index)


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def begins_json(text: str) -> bool:
    """Return whether the text is the beginning of some valid JSON value."""
    closers, quoted, escaped = "", False, False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers = {"{": "}", "[": "]"}[char] + closers
        elif char in "}]":
            closers = closers[1:]
    tails = ("", '"', '":0', ":0", "0", '"":0', "u0000", "0000", "000", "00", "\\", "rue", "alse", "ull")
    tails += ("ue", "lse", "se", "ll", "e", "l")
    for tail in tails:
        for quote in ("", '"', '":0'):
            try:
                json.loads(text + tail + quote + closers)
            except ValueError:
                continue
            return True
    return not text


def test_every_parser_has_an_example_and_is_documented() -> None:
    assert {name for name, _ in WRITERS} == set(TOOLS)
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text().split("## Reasoning parsers")
    assert not [name for name in TOOLS if f"`{name}`" not in page[0]]
    assert not [name for name in REASONING if f"`{name}`" not in page[1]]


@each_writer
def test_calls_are_parsed_complete_and_in_every_split(name: str, write: Writer) -> None:
    for case, calls in CALLS.items():
        text = write(calls)
        whole = parser(name).parse(text)
        assert calls_of(whole) == calls, case
        assert text_of(whole) == "", case
        starts = [piece for piece in whole if isinstance(piece, ToolStart)]
        assert [start.index for start in starts] == list(range(len(calls))), case
        ids = [f"functions.{n}:{i}" if name == "kimi_k2" else f"{n}-{i}" for i, (n, _) in enumerate(calls)]
        assert [start.id for start in starts] == ids, case
        for parts in splits(text):
            assert streamed(name, parts) == whole, (case, parts)


@each_writer
def test_text_before_and_after_is_kept(name: str, write: Writer) -> None:
    text = f"I will look.\n\n{write(CALLS['one'])}\nDone <b> [1] {{x}}."
    whole = parser(name).parse(text)
    assert calls_of(whole) == CALLS["one"]
    assert isinstance(whole[0], TextPiece)
    assert whole[0].text == "I will look."
    assert whole[-1] == TextPiece("Done <b> [1] {x}.")
    for parts in splits(text):
        assert streamed(name, parts) == whole, parts


@each_writer
def test_truncated_answer_has_a_json_prefix(name: str, write: Writer) -> None:
    text = write(CALLS["one"] + CALLS["nested"])
    for end in range(len(name) % 3, len(text), 3):
        pieces = parser(name).parse(text[:end])
        for start in pieces:
            if isinstance(start, ToolStart):
                assert begins_json(arguments_of(pieces, start.index)), text[:end]
        if end % 4 == 0:
            assert streamed(name, list(text[:end])) == pieces


PLAIN_TEXTS = [
    *("", " ", "Hello.\n", "1 < 2 [a] {b} `c` <d", '{"a": 1}\n', "[x](http://y) f(1)", "```python\nx\n```")
]


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_text_without_calls_is_unchanged(name: str) -> None:
    for text in PLAIN_TEXTS:
        expected = [TextPiece(text)] if text else []
        assert parser(name).parse(text) == expected, text
        assert streamed(name, list(text)) == expected, text


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_incomplete_marker_is_returned_as_text(name: str) -> None:
    """Every marker of a call is truncated, or followed by nonsense."""
    write = dict(WRITERS)[name]
    head = write(CALLS["one"]).split("get_weather")[0]
    for end in range(len(head)):
        for text in (head[:end], head[:end] + "§ nonsense"):
            assert text_of(parser(name).parse(text)) == text


FRAGMENTS = [
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "=",
    "(",
    ")",
    "\n",
    " ",
    "tru",
    "1.",
    "-",
    "é",
    "<",
    "'",
    "\\u12",
]


@each_writer
def test_broken_answers_never_raise_and_are_independent_of_the_split(name: str, write: Writer) -> None:
    rng = random.Random(name)
    text = write(CALLS["one"] + CALLS["marks"])
    for _ in range(15):
        cuts = sorted(rng.sample(range(len(text)), 3))
        parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        if rng.random() < 0.5:
            rng.shuffle(parts)
        broken = rng.choice(FRAGMENTS).join(parts)
        pieces = parser(name).parse(broken)
        for start in pieces:
            if isinstance(start, ToolStart):
                assert begins_json(arguments_of(pieces, start.index)), broken
        assert streamed(name, list(broken)) == pieces
        cut = rng.randrange(len(broken))
        assert streamed(name, [broken[:cut], broken[cut:]]) == pieces


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "glm45", "deepseek_v32", "hermes"])
def test_multiline_values(name: str) -> None:
    write = dict(WRITERS)[name]
    whole = parser(name).parse(write(LINES))
    assert calls_of(whole) == LINES
    for parts in splits(write(LINES)):
        assert streamed(name, parts) == whole


def test_arguments_are_streamed_as_they_arrive() -> None:
    """A long string must not wait for its end."""
    for name, write in WRITERS:
        if name in ("pythonic", "llama4_pythonic", "lfm2", "olmo3", "functiongemma", "gemma4"):
            continue
        text = write([("get_weather", {"city": "x" * 100})])
        one = parser(name)
        pieces = one.feed(text[: text.index("x" * 100) + 50])
        assert arguments_of(pieces, 0) == '{"city": "' + "x" * 50, name
