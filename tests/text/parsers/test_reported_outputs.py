"""Model outputs from public reports of parsing errors in vLLM, SGLang and others in 2026: malformed calls,
calls inside of reasoning, marks that must not become content. Each output gives the same message, however it
is split."""

import json
from typing import NamedTuple

import pytest

from quire.data.output_pieces import ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.text.parsers import answer_parser
from quire.text.parsers.streaming import Parser, join

_PROPERTIES = {name: {"type": "string"} for name in ("query", "command", "content", "path")}
SCHEMAS = {"f": {"properties": _PROPERTIES | {"i": {"type": "integer"}}}, "g": {"properties": {}}}

DSML = "｜DSML｜"
KIMI_CALL = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"i": 1}<|tool_call_end|>'
KIMI_K3_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="query" type="string"<|sep|>'
    "x<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
QWEN_CALL = "<tool_call>\n<function=f>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>"


class Report(NamedTuple):
    """A reported output, and the message that the parser must return for it."""

    tools: str
    text: str
    calls: tuple[tuple[str, dict[str, object]], ...]
    content: str = ""
    reasoning_parser: str = ""
    prompt: str = ""
    reasoning: str = ""


REPORTS = {
    "GLM-5.2 without <arg_value>, vLLM 49248": Report(
        "glm47",
        "<tool_call>f<arg_key>query</arg_key>how many days</arg_value></tool_call>",
        (("f", {"query": "how many days"}),),
    ),
    "GLM-4.7 without arguments, vLLM 32436": Report("glm47", "<tool_call>f</tool_call>", (("f", {}),)),
    "MiniMax-M2 with an end tag in a value, vLLM 44060": Report(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n'
        '<parameter name="content"><parameter>\n  <p></p>\n</parameter>'
        '</parameter>\n<parameter name="path">a.xml</parameter>\n</invoke>\n</minimax:tool_call>',
        (("f", {"content": "<parameter>\n  <p></p>\n</parameter>", "path": "a.xml"}),),
    ),
    "Qwen3-Coder with an end tag in a value": Report(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=content>\n<parameter>\n</parameter>\n</parameter>\n<parameter=i>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        (("f", {"content": "<parameter>\n</parameter>", "i": 3}),),
    ),
    "Qwen3-Coder without </function>": Report(
        "qwen3_coder", QWEN_CALL.replace("</function>\n", ""), (("f", {"query": "x"}),)
    ),
    "Qwen3.5 with a call in its reasoning, vLLM 39056": Report(
        "qwen3_coder",
        "I look.\n" + QWEN_CALL,
        (("f", {"query": "x"}),),
        reasoning_parser="qwen3",
        prompt="<think>\n",
        reasoning="I look.\n",
    ),
    "Qwen3.5 with the syntax of calls in its reasoning, LM Studio 1592": Report(
        "qwen3_coder",
        f"Use `<function=...>` or not.\n</think>\n\n{QWEN_CALL}",
        (("f", {"query": "x"}),),
        reasoning_parser="qwen3",
        prompt="<think>\n",
        reasoning="Use `<function=...>` or not.\n",
    ),
    "DeepSeek-V4 with 2>&1 before an end tag, vLLM 45877": Report(
        "deepseek_v4",
        f'ok</think>\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n'
        f'<{DSML}parameter name="command" string="true">'
        f"ls 2>&1</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>",
        (("f", {"command": "ls 2>&1"}),),
        reasoning_parser="deepseek_v4",
        prompt="<think>",
        reasoning="ok",
    ),
    "DeepSeek-V3.1 with V3's fence": Report(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>```json\n"
        '{"i":1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("f", {"i": 1}),),
    ),
    "Kimi-K2 with text between the marks, vLLM 28543": Report(
        "kimi_k2",
        f"Think </think> Hi<|tool_calls_section_begin|> spurious {KIMI_CALL}<|tool_calls_section_end|>",
        (("f", {"i": 1}),),
        content=" Hi",
        reasoning_parser="kimi_k2",
        prompt="<think>",
        reasoning="Think ",
    ),
    "Kimi-K2 with a line break in an id, vLLM 38441": Report(
        "kimi_k2",
        f"<|tool_calls_section_begin|>{KIMI_CALL.replace(':0', ':0' + chr(10))}<|tool_calls_section_end|>",
        (("f", {"i": 1}),),
    ),
    "Kimi-K2 with calls in its reasoning": Report(
        "kimi_k2",
        f"Think <|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>",
        (("f", {"i": 1}),),
        reasoning_parser="kimi_k2",
        prompt="<think>",
        reasoning="Think ",
    ),
    "Kimi-K3 that does not end its reasoning, vLLM 53246": Report(
        "kimi_k3",
        "Think" + KIMI_K3_CALL,
        (("f", {"query": "x"}),),
        reasoning_parser="kimi_k3",
        prompt="<|open|>think<|sep|>",
        reasoning="Think",
    ),
    "Kimi-K3 that ends its message but not its answer, vLLM 51412": Report(
        "kimi_k3",
        "Think<|close|>think<|sep|><|open|>response<|sep|>Hello.<|close|>message<|sep|>",
        (),
        content="Hello.",
        reasoning_parser="kimi_k3",
        prompt="<|open|>think<|sep|>",
        reasoning="Think",
    ),
    "gpt-oss with a call in the analysis channel, vLLM 35907": Report(
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>analysis to=functions.f code"
        '<|message|>\n{"path":"","query":"x"}<|call|>',
        (("f", {"path": "", "query": "x"}),),
        reasoning_parser="openai_gptoss",
        reasoning="Think.",
    ),
    "gpt-oss with the channel behind the name, vLLM 32587": Report(
        "openai",
        "<|channel|>commentary to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
        '{"i":1}<|call|>',
        (("f", {"i": 1}),),
        reasoning_parser="openai_gptoss",
    ),
    "Mistral with text and two calls, vLLM 48318": Report(
        "mistral",
        'I will help.[TOOL_CALLS]f{"i": 3}[TOOL_CALLS]g{}',
        (("f", {"i": 3}), ("g", {})),
        content="I will help.",
    ),
    "Gemma 4 with quotes in a string, vLLM 39069": Report(
        "gemma4",
        '<|tool_call>call:f{content:<|"|>She said "hello" {x}<|"|>,i:3}<tool_call|>',
        (("f", {"content": 'She said "hello" {x}', "i": 3}),),
    ),
    "Hermes with a call without arguments before another, SGLang 37634": Report(
        "hermes",
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"i": 2}}\n</tool_call>',
        (("g", {}), ("f", {"i": 2})),
    ),
    "Hermes with a bracket too many": Report(
        "hermes", '<tool_call>\n{"name": "f", "arguments": {"i": 1}}}\n</tool_call>', (("f", {"i": 1}),)
    ),
    "Hermes with a bracket too few": Report(
        "hermes", '<tool_call>\n{"name": "f", "arguments": {"i": 1}\n</tool_call>', (("f", {"i": 1}),)
    ),
    "Llama 3 with a list of calls": Report(
        "llama3_json",
        '[{"name": "f", "parameters": {"i": 1}}, {"name": "f", "parameters": {"i": 2}}]',
        (("f", {"i": 1}), ("f", {"i": 2})),
    ),
}


def parser_of(report: Report) -> Parser:
    return answer_parser(
        reasoning=report.reasoning_parser,
        tools=report.tools,
        schemas=SCHEMAS,
        prompt=report.prompt,
        make_id=lambda index, name: str(index),
    )


@pytest.mark.parametrize("name", REPORTS)
def test_reported_output(name: str) -> None:
    report = REPORTS[name]
    pieces = parser_of(report).parse(report.text)
    starts = [piece for piece in pieces if isinstance(piece, ToolStart)]
    texts = [
        [one.text for one in pieces if isinstance(one, ToolArguments) and one.index == i] for i in range(9)
    ]
    calls = tuple((start.name, json.loads("".join(texts[start.index]))) for start in starts)
    content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    assert (calls, content, reasoning) == (report.calls, report.content, report.reasoning)
    for cut in range(1, len(report.text)):
        parser = parser_of(report)
        parts = parser.feed(report.text[:cut]) + parser.feed(report.text[cut:]) + parser.end()
        assert join(parts) == pieces, cut
    parser = parser_of(report)
    assert join([piece for char in report.text for piece in parser.feed(char)] + parser.end()) == pieces
