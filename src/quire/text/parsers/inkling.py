"""Parser of Inkling's outputs: messages that begin with a mark for their type."""

from functools import partial
from typing import Any

from quire.text.parsers.json_calls import ObjectParser
from quire.text.parsers.streaming import Wait

_MESSAGE = "<|message_model|>"
_THINKING = "<|content_thinking|>"
_CALL = "<|content_invoke_tool_json|>"
_KINDS = ("<|content_text|>", _THINKING, _CALL, "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")


class Inkling(ObjectParser):
    """Parser of messages with reasoning, text or tool calls. Text before the mark of a call repeats the
    call's name and is dropped."""

    keeps_special_tokens = True
    reads_all = True

    def __init__(self, prompt: str = "", *, calls: bool = True, **options: Any) -> None:
        self.calls = calls
        super().__init__(**options)

    def script(self) -> Wait[None]:
        while (yield from self.peek()):
            yield from self.take(_MESSAGE)
            self.hold()
            header = yield from self.header(*_KINDS, *_ENDS, _MESSAGE)
            kind = yield from self.take(*_KINDS)
            if kind == _CALL and self.calls:
                if (yield from self.objects()):
                    yield from self.closing(_ENDS)
                else:
                    self.give_back()
                continue
            if header is None or not kind:
                self.give_back()
            self.release()
            emit = self.reasoning if kind == _THINKING else self.text
            yield from self.until((*_ENDS, _MESSAGE), emit)
            yield from self.take(*_ENDS)


REASONING = partial(Inkling, calls=False)
