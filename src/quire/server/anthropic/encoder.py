"""Encoding of a reply of /v1/messages, whole or as stream events."""

from typing import Any

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.data.pieces import Piece
from quire.errors import EngineError
from quire.server.anthropic.blocks import BlockEvents, Event, content_of
from quire.server.anthropic.errors import as_message_error
from quire.server.http.errors import describe
from quire.server.http.sse import AnswerEncoder, event, quote
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.service import GenerationService

_TEXT_HEAD = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
"""Encoded head of a text delta. A reply without parsers has a single block."""
_TRUNCATED = ("length", "repetition")
"""Finish reasons that mean that the output was truncated."""
_ERRORS = {"abort": "the request was aborted", "error": "the engine failed while generating this message"}
"""Finish reasons that this API reports as errors."""


class MessageEncoder(AnswerEncoder):
    """Encodes a message. A text-only event is concatenated from prepared bytes."""

    def __init__(self, api: GenerationService, talk: ChatRequest) -> None:
        self._api, self._talk = api, talk
        self._id = "msg_" + talk.job.id.removeprefix("msg-")
        self._listener = talk.parser()
        self._blocks = BlockEvents(hold_space=talk.parses)
        self._num_prompt = len(talk.job.prompts[0].token_ids)
        self._num_output = 0
        self._num_cached: int | None = None
        self._stop_fields: dict[str, Any] = {}
        self._error = ""
        """Error message if the engine ended the request with an error."""
        self._started = False

    # ---- streaming

    def encode(self, output: RequestOutput) -> bytes:
        events = [] if self._started else [self._start_event(output)]
        for completion in output.outputs:
            self._num_output += len(completion.token_ids)
            events += self._add_completion(completion)
        return b"".join(map(_encode_event, events))

    @property
    def text_only(self) -> bool:
        return True

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        self._num_output += num_tokens
        if self._blocks.open and not self._talk.parses:
            return _TEXT_HEAD + quote(text) + b"}}\n\n" if text else b""
        return b"".join(map(_encode_event, self._block_events(self._listener.hear_text(text))))

    def finish(self) -> bytes:
        self._check()
        usage = self._usage(self._num_output, self._num_cached)
        delta = {"type": "message_delta", "delta": self._stop_fields, "usage": usage}
        return b"".join(map(_encode_event, [*self._blocks.end(), delta, {"type": "message_stop"}]))

    def fail(self, error: Exception) -> bytes:
        return _encode_event(as_message_error(describe(error)))

    def _start_event(self, output: RequestOutput) -> Event:
        self._started = True
        self._num_cached = output.num_cached_tokens
        usage = self._usage(0, self._num_cached)
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return {"type": "message_start", "message": message}

    def _add_completion(self, completion: CompletionOutput) -> list[Event]:
        events = self._block_events(self._listener.hear(completion))
        if completion.finish_reason is not None:
            self._error = _ERRORS.get(completion.finish_reason, "")
            self._stop_fields = _stop_fields(completion, calls=self._blocks.calls)
        return events

    def _check(self) -> None:
        if self._error:
            raise EngineError(self._error)

    def _block_events(self, pieces: list[Piece]) -> list[Event]:
        return [event for piece in pieces for event in self._blocks.add(piece)]

    # ---- whole message

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (completion,) = output.outputs
        events = self._add_completion(completion)
        self._check()
        content = content_of([*events, *self._blocks.end()])
        usage = self._usage(len(completion.token_ids), output.num_cached_tokens)
        return self._message(content, self._stop_fields, usage)

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._talk.job.model,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _usage(self, num_output: int, num_cached: int | None) -> dict[str, int]:
        """Return the usage. Cached tokens are reported separately with --enable-prompt-tokens-details."""
        num_read = (num_cached or 0) if self._api.settings.api.enable_prompt_tokens_details else 0
        return {
            "input_tokens": self._num_prompt - num_read,
            "output_tokens": num_output,
            "cache_read_input_tokens": num_read,
            "cache_creation_input_tokens": 0,
        }


def _encode_event(body: Event) -> bytes:
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\n" + event(body)


def _stop_fields(output: CompletionOutput, *, calls: bool) -> dict[str, Any]:
    if output.finish_reason in _TRUNCATED:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
