"""Parser of Harmony, the output format of gpt-oss: messages in channels."""

import re
from functools import partial
from typing import Any

from quire.text.parsers.calls import ToolParser, is_name
from quire.text.parsers.streaming import Emit, Wait

_STARTS = ("<|start|>", "<|channel|>", "<|message|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(ToolParser):
    """Parser of Harmony: the channel `analysis` is reasoning, a message to a function is a tool call, and
    everything else is text.

    A message to one of the built-in tools counts as reasoning."""

    keeps_special_tokens = True
    reads_all = True
    reasoning_marks = ("", "<|channel|>final<|message|>")
    reasoning_breaks = ("<|channel|>commentary", "<|start|>assistant to=functions")
    opened = True

    def __init__(self, prompt: str = "", *, calls: bool = True, **options: Any) -> None:
        self.calls = calls
        super().__init__(**options)

    def script(self) -> Wait[None]:
        # The prompt ends with `<|start|>assistant`: the header may continue with the recipient.
        continues = yield from self.comes("to=")
        while continues or (yield from self.until(_STARTS, self.text)):
            continues = ""
            self.hold()
            header = yield from self.header("<|message|>")
            if header is None:
                yield from self.take(*_STARTS)
                self.give_back()
                continue
            yield from self.take("<|message|>")
            self.release()
            yield from self._message(header)
            yield from self.take(*(end for end in _ENDS if end != "<|start|>"))

    def _message(self, header: str) -> Wait[None]:
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        to_function = recipient is not None and name != recipient[1]
        if to_function and self.calls and is_name(name):
            yield from self._arguments(name)
        elif (channel and channel[1] == "analysis") or (recipient and not to_function):
            yield from self._body(self.reasoning)
        else:
            yield from self._body(self.text)

    def _body(self, emit: Emit) -> Wait[None]:
        yield from self.until(_ENDS, emit)

    def _arguments(self, name: str) -> Wait[None]:
        self.start(name)
        if (yield from self.space()) == "{":
            yield from self.json_value(self.arguments)
            yield from self.space()
        elif (yield from self.take("<|call|>")):
            self.arguments("{}")
            return
        yield from self._body(self.text)


REASONING = partial(Harmony, calls=False)
