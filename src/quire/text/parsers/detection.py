"""Detects the tool and reasoning parsers that fit a chat template.

A template renders the tool calls of earlier turns in the model's own format. So a conversation with one known
call is rendered, and the tool parser that returns exactly this call fits. Templates that describe the format
but do not render calls are matched by the marks of the format."""

import re
from os.path import commonprefix
from typing import Any, NamedTuple

from quire.data.output_pieces import TextPiece, ToolArguments, ToolStart
from quire.errors import RequestError
from quire.text.chat_template import choose_template, render_chat
from quire.text.parsers import REASONING, TOOLS
from quire.text.parsers.calls import parse_json
from quire.text.parsers.reasoning import Reasoning

_NAME = "get_weather"
_ARGUMENTS = {"city": "Paris", "days": 2}
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of the city."},
        "days": {"type": "integer", "description": "Number of days."},
    },
    "required": ["city"],
}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "Return the weather.", "parameters": _SCHEMA},
}
_USER = {"role": "user", "content": "How is the weather in Paris?"}
_CONTENT = "Qj7"
"""Content of the messages that are rendered to examine a template: the text around it is what the template
writes. No mark begins with this text."""
_IDS = ("abcdef123", f"functions.{_NAME}:0")
"""Ids for the call that is rendered: nine letters and digits for Mistral, and the form of Kimi-K2."""

_WITHOUT_MARKS = ("llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "xlam")
"""Parsers of formats without marks such as `<tool_call>`: a call must be at the start of the answer."""
_LEADING_MARK = re.compile(r"<\|[^|]*\|>|</?think>")
"""Marks of messages and of empty reasoning, which templates may write before a call."""
_PREFERRED = ("hermes", "qwen3_coder", "glm45", "llama3_json", "cohere_command3", "jamba", "pythonic")
"""Preferred names if several parsers parse the same text."""
_FORMAT_MARKS = {
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<|tool_list_start|>": "lfm2",
    "<|tool_call|>": "granite",
    "<atem:invoke": "muse_glimmer",
    "functools[": "phi4_mini_json",
    "<tool_call>": "hermes",
}
"""Tool parsers by marks in templates that render no calls; the first that a template contains decides."""
_REASONING_OF = {
    "openai": "openai_gptoss",
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
}
"""Reasoning parsers by tool parser, if their names differ."""
_ASSEMBLED_MARKS = ("hy_v3", "inkling", "kimi_k3", "muse_glimmer", "openai_gptoss")
"""Reasoning parsers with marks that templates assemble from parts, so that no mark is found in the template.
The tool parser of the family selects them."""
_NEVER_DETECTED = ("identity", "minimax_m2_append_think", "holo2")
"""Reasoning parsers that no template selects."""


class DetectedParsers(NamedTuple):
    """Names of the parsers that fit a chat template; empty if no parser fits."""

    tools: str = ""
    reasoning: str = ""


def detect_parsers(
    model_template: str | dict[str, str] | None, requested: str | None = None
) -> DetectedParsers:
    """Return the parsers for a model's chat template, or for the requested template."""
    try:
        template = choose_template(model_template, requested, with_tools=True)
    except RequestError:
        return DetectedParsers()
    reasoning = {name for name in REASONING if name not in _NEVER_DETECTED and _has_marks(name, template)}
    tools = _fitting_tool_parsers(template, reasoning)
    paired = [_REASONING_OF.get(name, name) for name in tools]
    reasoning.update(name for name in paired[:1] if name in _ASSEMBLED_MARKS)
    wrapped = [name for name in sorted(reasoning) if _wrapping_marks(name)]
    ranked = [name for name in (*paired, *wrapped, "deepseek_r1", *sorted(reasoning)) if name in reasoning]
    return DetectedParsers(next(iter(tools), ""), next(iter(ranked), ""))


def _has_marks(name: str, template: str) -> bool:
    """Return whether a template has the end mark of a reasoning parser, and a mark around the answer if the
    parser has such marks."""
    marks, wrapping = REASONING[name]("").reasoning_marks, _wrapping_marks(name)
    has_end = marks is not None and marks[1].strip() in template
    return has_end and (not wrapping or any(mark in template for mark in wrapping))


def _wrapping_marks(name: str) -> tuple[str, ...]:
    """Return the marks that a reasoning parser removes from the rest of an answer, such as `<response>`."""
    parser = REASONING[name]("")
    return parser.marks.dropped if isinstance(parser, Reasoning) else ()


def _fitting_tool_parsers(template: str, reasoning: set[str]) -> list[str]:
    """Return the names of the tool parsers that find the call that the template renders, best first: by the
    least text left around the call. `reasoning` are the reasoning parsers that fit the template."""
    if not _shows_tools(template):
        return []
    num_left: dict[str, int] = {}
    for call_id in _IDS:
        text = _render_call(template, call_id)
        for name in TOOLS if text else ():
            if (left := _text_around_call(name, text)) is not None:
                num_left.setdefault(name, len(left))
    if not num_left:
        return [name for mark, name in _FORMAT_MARKS.items() if mark in template][:1]
    order = (*_PREFERRED, *sorted(TOOLS))

    def rank(name: str) -> tuple[int, bool, bool, int]:
        is_wrapped = name in reasoning and bool(_wrapping_marks(name))
        return num_left[name], not is_wrapped, name == "xlam", order.index(name)

    return sorted(num_left, key=rank)


def _text_around_call(name: str, text: str) -> str | None:
    """Return the text that a tool parser finds around the call in a rendered template, or None if it does not
    find exactly this call."""
    pieces = TOOLS[name](schemas={_NAME: _SCHEMA}).parse(text)
    kinds = [type(piece) for piece in pieces]
    if kinds.count(ToolStart) != 1 or pieces[kinds.index(ToolStart)].name != _NAME:
        return None
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolArguments))
    leading = "".join(piece.text for piece in pieces[: kinds.index(ToolStart)])
    for mark in _wrapping_marks(name) if name in REASONING else ():
        leading = leading.replace(mark, "")
    if parse_json(arguments) != _ARGUMENTS or _LEADING_MARK.sub("", leading).strip():
        return None
    if leading.strip() and name in _WITHOUT_MARKS:
        return None
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)).strip()


def _shows_tools(template: str) -> bool:
    """Return whether the template writes the tools of a request into the prompt."""
    try:
        return _NAME in _render(template, [_USER], add_generation_prompt=True)
    except RequestError:
        return True  # Such a template may need a longer conversation.


def _render_call(template: str, call_id: str) -> str:
    """Return the text that the template renders for an assistant message with the call; empty if it fails."""
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    try:
        without_call = _render(template, [_USER, {"role": "assistant", "content": _CONTENT}])
        with_call = _render(template, [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except RequestError:
        return ""
    start = len(commonprefix([without_call.partition(_CONTENT)[0], with_call]))
    for first, last in ("<>", "[]"):  # The common prefix may end inside a mark, which must stay whole.
        opening = with_call.rfind(first, 0, start)
        if opening >= 0 and last not in with_call[opening:start]:
            start = opening
    return with_call[start:]


def _render(template: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    return render_chat(
        template,
        messages,
        bos_token="",
        eos_token="",
        tools=[_TOOL],
        add_generation_prompt=add_generation_prompt,
    )
