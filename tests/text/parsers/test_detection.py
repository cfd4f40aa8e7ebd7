"""Tests of the detection of the parsers that fit a chat template."""

from typing import Any

import pytest

from quire.text.chat_template import shipped_templates
from quire.text.parsers.detection import DetectedParsers, detect_parsers

TURNS = """{{ bos_token }}{% if tools %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% for m in messages %}<|turn|>{{ m.role }}
{{ m.content or "" }}{% for call in m.tool_calls or [] %}CALL{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
JSON = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
TAGS = """<function={{ call.function.name }}>
{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>"""
PAIRS = """{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor %}"""
CALLS = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "longcat": f"<longcat_tool_call>{JSON}</longcat_tool_call>",
    "jamba": f"<tool_calls>[{JSON}]</tool_calls>",
    "llama3_json": JSON.replace("arguments", "parameters", 1),
    "qwen3_coder": f"<tool_call>\n{TAGS}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{TAGS}\n</seed:tool_call>",
    "glm45": f"<tool_call>{{{{ call.function.name }}}}\n{PAIRS}</tool_call>",
    "mistral": f"[TOOL_CALLS] [{JSON}]",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>"
    "{{ call.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": "[{{ call.function.name }}({% for k, v in call.function.arguments.items() %}"
    "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %})]",
}
"""Calls as templates render them, by the parser of the format."""
THINK = "{% if false %}<think></think>{% endif %}"


def template(call: str) -> str:
    return TURNS.replace("CALL", call)


@pytest.mark.parametrize("name", CALLS)
def test_rendered_call_selects_the_tool_parser(name: str) -> None:
    assert detect_parsers(template(CALLS[name])) == DetectedParsers(name, "")


@pytest.mark.parametrize("name", shipped_templates())
def test_shipped_templates_select_the_parser_of_their_name(name: str) -> None:
    assert detect_parsers(shipped_templates()[name].read_text()).tools == name


@pytest.mark.parametrize(
    ("marks", "call", "expected"),
    [
        (THINK, CALLS["hermes"], ("hermes", "qwen3")),
        (THINK, CALLS["glm45"], ("glm45", "glm45")),
        (THINK, CALLS["kimi_k2"], ("kimi_k2", "kimi_k2")),
        (THINK + "<response>", CALLS["hermes"], ("ernie45", "ernie45")),
        (THINK, "", ("", "deepseek_r1")),
        ("{{ '<seed:think></seed:think>' }}", CALLS["seed_oss"], ("seed_oss", "seed_oss")),
        ("[THINK][/THINK]", CALLS["mistral"], ("mistral", "mistral")),
        ("", CALLS["hermes"], ("hermes", "")),
    ],
)
def test_marks_select_the_reasoning_parser(marks: str, call: str, expected: tuple[str, str]) -> None:
    assert detect_parsers(marks + template(call)) == expected


def test_format_that_the_template_only_describes() -> None:
    """A template may describe the format of calls, but not render the calls of earlier turns."""
    described = template("").replace("# Tools", "# Tools\nAnswer with <tool_call>{...}</tool_call>.")
    assert detect_parsers(described).tools == "hermes"


@pytest.mark.parametrize(
    "unknown",
    [
        None,
        {},
        {"rag": template(CALLS["hermes"])},
        "{{ 1 +",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }}<tool_call>",
        template(f"<TOOLCALL>[{JSON}]</TOOLCALL>"),
        template(f"<other:tool_call>{TAGS}</other:tool_call>"),
        template(f"Action: {JSON}"),
        template("<|my_call|>{{ call.function.name }}"),
    ],
    ids=[
        "none",
        "empty",
        "other",
        "syntax",
        "raises",
        "no tools",
        "wrapped",
        "wrapped tags",
        "after text",
        "no arguments",
    ],
)
def test_unknown_formats_select_no_parser(unknown: Any) -> None:
    assert detect_parsers(unknown) == DetectedParsers()


def test_template_for_tools_and_requested_template() -> None:
    named = {"default": "{{ messages }}", "tool_use": template(CALLS["hermes"])}
    assert detect_parsers(named).tools == "hermes"
    assert detect_parsers(named, template(CALLS["glm45"])).tools == "glm45"
