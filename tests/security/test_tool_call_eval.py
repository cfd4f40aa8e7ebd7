"""Code in tool calls (CVE-2025-9141): the parser of Qwen3-Coder called eval on arguments that the model
wrote, and a prompt can make a model write anything. Quire parses arguments as JSON or as Python literals."""

from pathlib import Path
from typing import Any

import pytest
from ask import chat
from fake_engine import FakeEngine

from quire.text.parsers import TOOLS, answer_parser

CODE = "[__import__('os').mkdir('{}')]"
"""Expression that makes a directory when it is evaluated."""
FORMS = [
    "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "[f(a={})]",
    '<tool_call>{{"name": "f", "arguments": {{"a": {}}}}}</tool_call>',
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    '<minimax:tool_call><invoke name="f"><parameter name="a">{}</parameter></invoke></minimax:tool_call>',
    "<|tool_call>call:f{{a:{}}}<tool_call|>",
]
"""Formats in which models write the call `f(a=...)`, by the name of the parser."""
KINDS: list[dict[str, Any]] = [{}, {"type": "array"}, {"type": "object"}, {"type": "integer"}]


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_arguments_of_an_answer_are_not_evaluated(form: str, kind: dict[str, Any], tmp_path: Path) -> None:
    parser = "qwen3_coder" if form == FORMS[0] else "pythonic"
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    schema = {"type": "object", "properties": {"a": kind}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = form.format(CODE.format(tmp_path / "ran"))
    reply = chat(FakeEngine(answer), settings, tools=tools)
    assert reply.status_code == 200 and not (tmp_path / "ran").exists()
    assert "__import__" in reply.text, "the client gets the text that the model wrote"


@pytest.mark.parametrize("name", list(TOOLS))
def test_no_parser_evaluates_arguments(name: str, tmp_path: Path) -> None:
    code = CODE.format(tmp_path / "ran")
    for kind in KINDS:
        schemas = {"f": {"type": "object", "properties": {"a": kind}}}
        for form in FORMS:
            answer_parser(tools=name, schemas=schemas).parse(form.format(code))
    assert not (tmp_path / "ran").exists()


def test_code_would_run_if_it_were_evaluated(tmp_path: Path) -> None:
    eval(CODE.format(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
