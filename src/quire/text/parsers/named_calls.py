"""Parser of tool calls that are a name between marks, followed by JSON arguments."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.text.parsers.calls import ToolParser, is_name, kimi_id, vllm_id
from quire.text.parsers.streaming import Wait


@dataclass(frozen=True)
class NamedMarks:
    """Texts that mark the parts of a tool call with a name and JSON arguments."""

    opens: tuple[str, ...]
    """Marks that may precede the calls."""
    call: str
    before_arguments: str
    closes: tuple[str, ...]
    name: Callable[[str], str] = str.strip
    """Extracts the function's name from the text between `call` and `before_arguments`."""
    has_id: bool = False
    """Whether the text before the arguments is the call's id."""


class NamedCalls(ToolParser):
    """Parser of calls that are a name and JSON arguments."""

    keeps_special_tokens = True
    marks: NamedMarks

    def __init__(self, marks: NamedMarks, **options: Any) -> None:
        self.default_id = kimi_id if marks.has_id else vllm_id
        super().__init__(marks, **options)

    def script(self) -> Wait[None]:
        while (yield from self.until((*self.marks.opens, self.marks.call), self.text)):
            self.hold()
            if (yield from self.take(*self.marks.opens)):
                yield from self.header(self.marks.call)  # text before the first call is dropped
            if (yield from self.take(self.marks.call)) and (yield from self._call()):
                yield from self.closing(self.marks.closes)
            else:
                self.give_back()

    def _call(self) -> Wait[bool]:
        header = yield from self.header(self.marks.before_arguments)
        if header is None or not is_name(name := self.marks.name(header)):
            return False
        yield from self.take(self.marks.before_arguments)
        yield from self.space()
        yield from self.take("```json")
        if (yield from self.space()) != "{":
            return False
        self.start(name, header.strip() if self.marks.has_id and ":" in header else None)
        return (yield from self.json_value(self.arguments))


def _kimi_name(header: str) -> str:
    """Return the function's name in a header such as `functions.name:0`."""
    name, _, number = header.strip().rpartition(":")
    return (name if number.isdecimal() else header.strip()).removeprefix("functions.")


_DEEPSEEK_V31 = NamedMarks(
    opens=("<｜tool▁calls▁begin｜>",),
    call="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V31 = partial(NamedCalls, _DEEPSEEK_V31)
DEEPSEEK_V3 = partial(
    NamedCalls,
    replace(
        _DEEPSEEK_V31,
        before_arguments="```json",
        name=lambda header: header.rpartition("<｜tool▁sep｜>")[2].strip(),
    ),
)
KIMI_K2 = partial(
    NamedCalls,
    NamedMarks(
        opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        call="<|tool_call_begin|>",
        before_arguments="<|tool_call_argument_begin|>",
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        name=_kimi_name,
        has_id=True,
    ),
)
