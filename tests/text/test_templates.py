"""Tests of templates with tools: a conversation with calls is rendered as by transformers, and the parser of
the same name reads the calls from the rendered text."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.data.output_pieces import ToolArguments, ToolStart
from quire.errors import RequestError
from quire.text.chat_template import content_format, normalise, render_chat, shipped_templates
from quire.text.parsers import answer_parser

GLM45 = """[gMASK]<sop>{% if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>{{ '\\n<think></think>' }}
{%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for tc in m.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name }}
{%- for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{%- endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- elif m.role == 'system' %}<|system|>
{{ m.content }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

KIMI_K2 = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}
{%- for tc in m.tool_calls or [] %}{% if loop.first %}<|tool_calls_section_begin|>{% endif -%}
<|tool_call_begin|>{{ tc.id }}<|tool_call_argument_begin|>{{ tc.function.arguments | tojson -}}
<|tool_call_end|>
{%- if loop.last %}<|tool_calls_section_end|>{% endif %}{% endfor %}
{%- else %}<|im_system|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

TEMPLATES = {name: path.read_text() for name, path in shipped_templates().items()}
TEMPLATES |= {"glm45": GLM45, "kimi_k2": KIMI_K2}

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Für \"x\" & 'y'", "parameters": SCHEMA}}
    for name in ("weather", "trains")
]
REQUESTED_CALLS = [
    ("weather", {"city": "Łódź \"old\" & 'new'\nline", "days": 2}),
    ("trains", {"city": "2", "deep": {"a": [1, None, True], "b": "]"}}),
]
CALLS = [
    {
        "id": f"functions.{name}:{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    for index, (name, arguments) in enumerate(REQUESTED_CALLS)
]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather, then trains?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": '{"sky": "grey"}', "tool_call_id": CALLS[0]["id"]},
    {"role": "tool", "content": "none", "tool_call_id": CALLS[1]["id"]},
    {"role": "assistant", "content": "Grey."},
    {"role": "user", "content": "Thanks <b>!"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def as_sent(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation as clients send it: with arguments as JSON text, and no content in messages
    with calls."""
    sent = json.loads(json.dumps(conversation))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = None
    return list(sent)


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversation_with_calls_equals_transformers(name: str, with_system: bool) -> None:
    template = TEMPLATES[name]
    conversation = [{"role": "system", "content": "Be brief."}, *TALK] if with_system else TALK
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True}
    expected, _ = render_jinja_template([conversation], chat_template=template, **NAMES, **options)
    messages = normalise(as_sent(conversation), content_format(template))
    assert render_chat(template, messages, **NAMES, **options) == expected[0]
    assert "weather" in expected[0] and "grey" in expected[0] and ("Be brief." in expected[0]) is with_system


@pytest.mark.parametrize("name", TEMPLATES)
def test_parser_reads_what_its_template_renders(name: str) -> None:
    question = TALK[:1]
    before = render_chat(TEMPLATES[name], question, **NAMES, tools=TOOLS, add_generation_prompt=True)
    after = render_chat(TEMPLATES[name], [*question, TALK[1]], **NAMES, tools=TOOLS)
    assert after.startswith(before)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
    pieces = answer_parser(tools=name, schemas=schemas).parse(after[len(before) :])
    names = [piece.name for piece in pieces if isinstance(piece, ToolStart)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, ToolArguments)]
    assert list(zip(names, arguments, strict=True)) == REQUESTED_CALLS


@pytest.mark.parametrize(
    "calls",
    [
        "f",
        {"function": {}},
        [3],
        [{}],
        [{"function": None}],
        [{"function": {"name": 3, "arguments": "{}"}}],
        [{"function": {"name": "f", "arguments": "{"}}],
        [{"function": {"name": "f", "arguments": "[1]"}}],
        [{"function": {"name": "f", "arguments": "[" * 100_000}}],
        [{"function": {"name": "f", "arguments": 1 << 70}}],
        [{"function": {"name": "f", "arguments": "1" * 5000}}],
    ],
)
def test_invalid_calls_are_refused(calls: Any) -> None:
    with pytest.raises(RequestError) as refused:
        normalise([{"role": "assistant", "content": None, "tool_calls": calls}], "string")
    assert refused.value.param == "messages" and len(str(refused.value)) < 400
