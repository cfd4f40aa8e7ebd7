"""Parser of Muse Glimmer's outputs: messages with a recipient, in which tool calls are tags."""

import re
from functools import partial
from typing import Any

from quire.text.parsers.streaming import Wait
from quire.text.parsers.tagged_calls import TaggedCalls, invoke_tags

_STARTS = ("<|start|>", "<|message|>")
_ENDS = ("<|eom|>", "<|eot|>")
_TO_SELF = re.compile(r"to=self\b")
_TAGS = invoke_tags("<atem:function_calls>", closes=("</atem:function_calls>",), prefix="atem:")


class MuseGlimmer(TaggedCalls):
    """Parser of Muse Glimmer's outputs: messages to the model itself are reasoning. In other messages, tags
    are calls and the rest is text."""

    reads_all = True
    reasoning_marks = ("", " to=user<|message|>")
    reasoning_breaks = (*_TAGS.opens, _TAGS.call)
    opened = True

    def __init__(self, prompt: str = "", *, calls: bool = True, **options: Any) -> None:
        self.calls = calls
        super().__init__(_TAGS, **options)

    def script(self) -> Wait[None]:
        # The prompt ends with `<|start|>assistant`: the header may continue with the recipient.
        if (yield from self.comes("to=")):
            yield from self._message()
        call_marks = (*_TAGS.opens, _TAGS.call) if self.calls else ()
        while mark := (yield from self.until((*_STARTS, *_ENDS, *call_marks), self.text)):
            if mark in call_marks:
                yield from self.section()
            elif mark in _ENDS:
                yield from self.take(mark)
            else:
                yield from self._message()

    def _message(self) -> Wait[None]:
        """Read the header of a message, and the whole message if it is reasoning."""
        self.hold()
        header = yield from self.header("<|message|>")
        if header is None:
            yield from self.take(*_STARTS)
            self.give_back()
            return
        yield from self.take("<|message|>")
        self.release()
        if _TO_SELF.search(header):
            yield from self.until((*_ENDS, "<|start|>"), self.reasoning)


REASONING = partial(MuseGlimmer, calls=False)
