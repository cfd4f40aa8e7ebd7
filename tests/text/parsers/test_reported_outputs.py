"""Model outputs from public reports of parsing errors in vLLM, SGLang and others in 2026: malformed calls,
calls inside of reasoning, marks that must not become content. Each output gives the same message, however it
is split."""

import json
import random
from itertools import pairwise
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
    "Gemma 4 with its own quotes in a string, vLLM 48678": Report(
        "gemma4",
        '<|tool_call>call:f{command:<|"|>x = sql(<|"|><|"|><|"|> SELECT 1 <|"|><|"|><|"|>).df()<|"|>,'
        'path:<|"|>df_1<|"|>}<tool_call|>',
        (("f", {"command": 'x = sql(""" SELECT 1 """).df()', "path": "df_1"}),),
    ),
    "Gemma 4 with strings of JSON and Python in containers, vLLM 51284": Report(
        "gemma4",
        """<|tool_call>call:f{query:["ds } 1"],path:['ds_2'],content:{"mode": "fast, {x}"}}<tool_call|>""",
        (("f", {"query": ["ds } 1"], "path": ["ds_2"], "content": {"mode": "fast, {x}"}}),),
    ),
    "Gemma 4 with JSON in place of its own syntax, omlx 1854": Report(
        "gemma4",
        '<|tool_call>call:f{"content": "has } brace", "i": 3}<tool_call|>',
        (("f", {"content": "has } brace", "i": 3}),),
    ),
    "Gemma 4 with a call without arguments, SGLang 35564": Report(
        "gemma4",
        "<|tool_call>call:g{}<tool_call|><|tool_call>call:f{i:1}<tool_call|>",
        (("g", {}), ("f", {"i": 1})),
    ),
    "MiniMax-M2 with a call without arguments, SGLang 35564": Report(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        (("g", {}),),
    ),
    "Mistral with two calls without arguments, SGLang 35564": Report(
        "mistral", "[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]g[ARGS]{}", (("g", {}), ("g", {}))
    ),
    "Command A with a call without arguments, SGLang 35564": Report(
        "cohere_command4",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "g", "parameters": {}}]<|END_ACTION|>',
        (("g", {}),),
    ),
    "GLM-4.5 with an integer, SGLang 35564": Report(
        "glm45",
        "<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>123</arg_value>\n</tool_call>",
        (("f", {"i": 123}),),
    ),
    "Step3 with two calls, SGLang 31915 and vLLM 55082": Report(
        "step3",
        "<｜tool_calls_begin｜>\n"
        + "\n".join(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
            f'<steptml:parameter name="{key}">{value}</steptml:parameter>\n'
            "</steptml:invoke><｜tool_call_end｜>"
            for key, value in (("query", "x"), ("i", "4"))
        )
        + "\n<｜tool_calls_end｜>",
        (("f", {"query": "x"}), ("f", {"i": 4})),
    ),
    "xLAM with a call without arguments before another, vLLM 47901": Report(
        "xlam",
        '[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"query": "Seattle", "i": 2}}]',
        (("g", {}), ("f", {"query": "Seattle", "i": 2})),
    ),
    "Hunyuan A13B with a call without arguments before another, vLLM 47901": Report(
        "hunyuan_a13b",
        '<tool_calls>[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"i": 2}}]</tool_calls>',
        (("g", {}), ("f", {"i": 2})),
    ),
    "xLAM with text before its calls, vLLM 51697": Report(
        "xlam",
        'I look.\n```json\n[{"name": "f", "arguments": {"query": "Seattle", "path": "WA"}}]\n```',
        (("f", {"query": "Seattle", "path": "WA"}),),
        content="I look.",
    ),
    "Jamba with compact JSON, vLLM 48852": Report(
        "jamba",
        '<tool_calls>[{"name":"f","arguments":{"query":"a,b","i":1}}]</tool_calls>',
        (("f", {"query": "a,b", "i": 1}),),
    ),
    "InternLM with compact JSON, vLLM 48852": Report(
        "internlm",
        '<|action_start|><|plugin|>\n{"name":"f","parameters":{"query":"a,b","i":1}}<|action_end|>',
        (("f", {"query": "a,b", "i": 1}),),
    ),
    "Devstral with [ARGS], Rapid-MLX 579": Report(
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"path": "/tmp/foo.txt"}',
        (("f", {"path": "/tmp/foo.txt"}),),
    ),
    "LFM2.5 with single quotes, llama.cpp 23838": Report(
        "lfm2",
        "<|tool_call_start|>[f(query='current temperature in Mexico City', i=5)]<|tool_call_end|>",
        (("f", {"query": "current temperature in Mexico City", "i": 5}),),
    ),
    "Llama 3.3 with a type, llama.cpp 24329": Report(
        "llama3_json", '{"type": "function", "name": "f", "parameters": {"i": 1}}', (("f", {"i": 1}),)
    ),
    "Muse Glimmer with a call at once, llama.cpp 29240": Report(
        "muse_glimmer",
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
        '<atem:parameter name="content">{"alias": "Show <b>"}</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|>",
        (("f", {"content": '{"alias": "Show <b>"}'}),),
        reasoning_parser="muse_glimmer",
    ),
    "Qwen3 with values that have angle brackets, vLLM 46047": Report(
        "qwen3_coder",
        QWEN_CALL.replace("query", "content").replace("\nx\n", "\nif x<5 && y>3: <p>\n"),
        (("f", {"content": "if x<5 && y>3: <p>"}),),
    ),
    "Qwen3 with text before its call, llama.cpp 20260": Report(
        "qwen3_coder",
        f"Plan.\n</think>\n\nI look it up.\n\n{QWEN_CALL}",
        (("f", {"query": "x"}),),
        content="\n\nI look it up.",
        reasoning_parser="qwen3",
        prompt="<think>\n",
        reasoning="Plan.\n",
    ),
    "gpt-oss without <|constrain|>, LM Studio 942": Report(
        "openai",
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|>"
        '{"query":{"envs":{"sd":{}}}}<|call|>',
        (("f", {"query": {"envs": {"sd": {}}}}),),
        reasoning_parser="openai_gptoss",
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
    rng = random.Random(name)
    for num_cuts in (*range(2, 9), len(report.text) // 2, len(report.text) - 1):
        cuts = sorted(rng.sample(range(1, len(report.text)), min(num_cuts, len(report.text) - 1)))
        parser = parser_of(report)
        parts = [report.text[a:b] for a, b in pairwise([0, *cuts, len(report.text)])]
        streamed = [piece for part in parts for piece in parser.feed(part)] + parser.end()
        assert join(streamed) == pieces, parts
