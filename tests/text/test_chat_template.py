"""Tests of chat_template: rendering must agree with transformers; hostile or broken input is a client
error."""

import copy
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import RequestError
from quire.text.chat_template import choose_template, content_format, normalise, render_chat

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{#- The system message is pulled out, so that the tools can go into it. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if not message['content'] %}{% continue %}{% endif %}
        {%- generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

PARTS = """{% macro render(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- for message in messages %}<{{ message.role }}>{{ render(message.content) }}{% endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "météo",
            "description": "Weather <in> a \"city\" & 'more'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TALK = [
    {"role": "user", "content": "  How are you? 你好 <b>&</b> "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."},
    {"role": "user", "content": "Good."},
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief. "}, *TALK]
CALL = {"type": "function", "function": {"name": "météo", "arguments": {"city": "Zürich", "days": 2}}}
WITH_TOOL_CALL = [
    *TALK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "{'sky': 'blå'}"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def reference(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=template, **NAMES, **kwargs)
    return str(rendered[0])


@pytest.mark.parametrize(
    ("template", "messages", "kwargs"),
    [
        (SMOLLM2, TALK, {}),
        (SMOLLM2, WITH_SYSTEM, {}),
        (LLAMA31, WITH_SYSTEM, {}),
        (LLAMA31, TALK, {"tools": TOOLS}),
        (LLAMA31, WITH_TOOL_CALL, {"tools": TOOLS, "date_string": "1 Jan 2024"}),
        (QWEN3, WITH_SYSTEM, {}),
        (QWEN3, WITH_TOOL_CALL, {"tools": TOOLS}),
        (QWEN3, TALK, {"enable_thinking": False}),
        (MISTRAL, TALK, {}),
        (PARTS, TALK, {}),
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_rendering_equals_transformers(
    template: str, messages: list[dict[str, Any]], kwargs: dict[str, Any], add_generation_prompt: bool
) -> None:
    """Catches whitespace control, tojson escaping, loop controls or globals that differ from
    transformers."""
    kwargs = {**kwargs, "add_generation_prompt": add_generation_prompt}
    assert render_chat(template, messages, **NAMES, **kwargs) == reference(template, messages, **kwargs)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        *((template, "Once upon a") for template in (SMOLLM2, LLAMA31, QWEN3, MISTRAL, PARTS)),
        *((template, "trailing space ") for template in (SMOLLM2, LLAMA31, QWEN3, MISTRAL, PARTS)),
        (PARTS, [{"type": "text", "text": "upon "}, {"type": "text", "text": "a "}]),
    ],
)
def test_continue_final_message_equals_transformers(template: str, content: Any) -> None:
    """Catches an end-of-turn marker after the text that the model should continue."""
    messages = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": content}]
    before = copy.deepcopy(messages)
    rendered = render_chat(template, messages, **NAMES, continue_final_message=True)
    assert rendered == reference(template, messages, continue_final_message=True)
    assert rendered.rstrip().endswith("space" if content == "trailing space " else "upon a")
    assert messages == before


def test_developer_role_becomes_system_if_the_template_lacks_it() -> None:
    """Catches a template's own system message beside the developer's."""
    user = {"role": "user", "content": "hi"}
    conversation = [
        {"role": "developer", "content": "Be brief."},
        user,
        {"role": "developer", "content": "Rhyme."},
    ]
    system = {"role": "system", "content": "Be brief.\n\nRhyme."}
    assert render_chat(SMOLLM2, conversation) == render_chat(SMOLLM2, [system, user])
    knows = "{% for m in messages %}{{ '*' if m.role == 'developer' }}{{ m.content }}{% endfor %}"
    assert render_chat(knows, conversation) == "*Be brief.hi*Rhyme."
    mixed = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, conversation[2]]
    each = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert render_chat(each, mixed) == "<Be brief.><Rhyme.>"


def test_generation_prompt_and_continuation_exclude_each_other() -> None:
    with pytest.raises(RequestError) as caught:
        render_chat(SMOLLM2, TALK, add_generation_prompt=True, continue_final_message=True)
    message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "final", [{"role": "assistant"}, {"role": "assistant", "content": [{"type": "image"}]}]
)
def test_continuation_needs_a_final_message(final: dict[str, Any]) -> None:
    """Catches a crash on a final message without text."""
    with pytest.raises(RequestError, match="continue_final_message"):
        render_chat(PARTS, [*TALK, final], continue_final_message=True)


def test_template_that_hides_the_final_message() -> None:
    """Catches a prompt truncated at a wrong place when the template drops the last message."""
    with pytest.raises(RequestError, match="final message"):
        render_chat("{{ messages[0].content }}", TALK, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ 'a' + messages[0] }}", "concatenate"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for %}", "not valid Jinja"),
    ],
)
def test_template_errors_are_client_errors(template: str, message: str) -> None:
    """Catches a 500 where the template refuses the conversation, and a message that hides the reason."""
    with pytest.raises(RequestError, match=message):
        render_chat(template, TALK)


def test_missing_special_tokens_render_empty() -> None:
    """Catches the word None at the start of every prompt of a model without BOS."""
    assert render_chat("{{ bos_token }}{{ messages[0].role }}", TALK, bos_token=None) == "user"


def test_kwargs_cannot_replace_the_conversation() -> None:
    """Catches template kwargs of a request that shadow the template's own arguments."""
    assert render_chat("{{ messages[0].role }}{{ template }}", TALK, template="x") == "userx"


def test_models_without_template_are_refused() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        render_chat(None, TALK)
    with pytest.raises(RequestError, match="--chat-template"):
        choose_template(None)
    with pytest.raises(RequestError, match="at least one message"):
        render_chat(SMOLLM2, [])


def test_choosing_among_named_templates() -> None:
    """Catches tools sent to a template without tool support, and a name taken for a template."""
    named = {"default": "D", "tool_use": "T", "rag": "R"}
    assert choose_template("own") == "own"
    assert choose_template(None, "asked") == "asked"
    assert choose_template(named) == "D"
    assert choose_template(named, with_tools=True) == "T"
    assert choose_template(named, "rag", with_tools=True) == "R"
    with pytest.raises(RequestError, match="rag"):
        choose_template({"rag": "R"})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SMOLLM2, "string"),
        (LLAMA31, "string"),
        (QWEN3, "string"),
        (MISTRAL, "string"),
        (PARTS, "openai"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c | list %}{{ p.text }}{% endfor %}"
            "{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set c = m.content if m.content else [] %}"
            "{% for p in c[1:] %}{{ p }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for t in m.tool_calls %}{{ t.content }}{% endfor %}{% endfor %}",
            "string",
        ),
    ],
)
def test_content_format(template: str, expected: str) -> None:
    """Catches parts passed to a template that expects strings, or the reverse."""
    assert content_format(template) == expected


def test_normalise_content() -> None:
    """Catches lost parts, and content in a form that the template cannot read."""
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    assert normalise(messages, "string") == [
        {"role": "user", "content": "a\nb\nc", "name": "x"},
        {"role": "assistant", "content": ""},
    ]
    assert normalise(messages, "openai")[0]["content"] == [{"type": "text", "text": text} for text in "abc"]
    assert normalise([{"role": "user", "content": "a"}], "openai")[0]["content"] == [
        {"type": "text", "text": "a"}
    ]


def test_normalise_parses_tool_arguments() -> None:
    """Catches arguments that the template would write as a quoted string, and a changed request."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    empty = {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}
    message = {"role": "assistant", "tool_calls": [call, empty]}
    calls = normalise([message], "string")[0]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {}]
    assert call["function"]["arguments"] == '{"a": 1}'
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(RequestError, match="'f'"):
        normalise([message], "string")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "text"),
        ({"role": "user", "content": [{"type": "text"}]}, "needs a string"),
        ({"role": "user", "content": [3]}, "int"),
        ({"role": "user", "content": 3}, "string or a list"),
        ({"content": "no role"}, "role"),
        ("not a message", "role"),
    ],
)
def test_invalid_messages_are_named(message: Any, expected: str) -> None:
    """Catches a crash, or a message that is silently dropped, where the request is invalid."""
    with pytest.raises(RequestError, match=expected):
        normalise([message], "string")
