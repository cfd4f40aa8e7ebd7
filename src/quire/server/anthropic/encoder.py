"""Encoding of a reply of /v1/messages, whole or as stream events. Text, reasoning and tool calls of the
output become content blocks; each block stops before the next one starts."""

import json
import re
from typing import Any

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.data.outputs import CompletionOutput, RequestOutput
from quire.errors import EngineError
from quire.server.anthropic.errors import as_message_error
from quire.server.http.errors import error_body
from quire.server.http.sse import AnswerEncoder, event, quote
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.encoder import transfer_field
from quire.server.openai.service import GenerationService

Event = dict[str, Any]
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate: JSON can contain it, but it is not a character."""


class BlockEvents:
    """The content blocks of one message, as stream events. With `hold_space`, white space is held back until
    other text follows, since a block of another type may follow instead."""

    def __init__(self, *, hold_space: bool) -> None:
        self.index = -1
        """Index of the last block that was started."""
        self.open = ""
        """Type of the open block; empty if none is open."""
        self.calls = False
        self._hold_space = hold_space
        self._space = ""

    def add(self, piece: Piece) -> list[Event]:
        match piece:
            case TextPiece(text):
                return self._text(text)
            case ReasoningPiece(text):
                events = self._begin("thinking", thinking="", signature="")
                return [*events, self._delta("thinking_delta", thinking=text)]
            case ToolStart(_, id, name):
                self.calls = True
                return [*self._close(), *self._begin("tool_use", id=id, name=name, input={})]
            case ToolArguments(_, text):
                return [self._delta("input_json_delta", partial_json=text)]

    def end(self) -> list[Event]:
        """Close the open block and return the events. A message without a block gets an empty text block."""
        return [*([] if self.index >= 0 else self._begin("text", text="")), *self._close()]

    def _text(self, text: str) -> list[Event]:
        if self._hold_space and self.open != "text":
            text = self._space = self._space + text
            if text.isspace():
                return []
        events = self._begin("text", text="")
        return [*events, self._delta("text_delta", text=text)]

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        if self.open == kind:
            return []
        events = self._close()
        self.open = kind
        self.index += 1
        block = {"type": kind, **fields}
        return [*events, {"type": "content_block_start", "index": self.index, "content_block": block}]

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, **fields}}

    def _close(self) -> list[Event]:
        self._space = ""
        if not self.open:
            return []
        signed = [self._delta("signature_delta", signature="")] if self.open == "thinking" else []
        self.open = ""
        return [*signed, {"type": "content_block_stop", "index": self.index}]


def content_of(events: list[Event]) -> list[dict[str, Any]]:
    """Return the content blocks that the events describe."""
    blocks: list[dict[str, Any]] = []
    texts: dict[tuple[int, str], list[str]] = {}
    for body in events:
        if body["type"] == "content_block_start":
            blocks.append(dict(body["content_block"]))
        elif body["type"] == "content_block_delta":
            (name, text) = list(body["delta"].items())[1]
            texts.setdefault((body["index"], name), []).append(text)
    for (index, name), parts in texts.items():
        text = "".join(parts)
        blocks[index] |= {"input": _parse_object(text)} if name == "partial_json" else {name: text}
    return blocks


def _parse_object(text: str) -> dict[str, Any]:
    """Return the input of a tool call, or {} if its JSON is incomplete or not an object."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            value = json.loads(_LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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
    """Encoder of a /v1/messages reply, as stream events or whole."""

    def __init__(self, api: GenerationService, chat: ChatRequest) -> None:
        self._api, self._chat = api, chat
        self._id = "msg_" + chat.call.id.removeprefix("msg-")
        self._parser = chat.parser()
        self._blocks = BlockEvents(hold_space=chat.parses)
        self._num_output = 0
        self._num_cached = self._num_created = 0
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
        if self._blocks.open and not self._chat.parses:
            return _TEXT_HEAD + quote(text) + b"}}\n\n" if text else b""
        return b"".join(map(_encode_event, self._block_events(self._parser.parse_text(text))))

    def finish(self) -> bytes:
        self._check()
        usage = self._usage(self._num_output)
        delta = {"type": "message_delta", "delta": self._stop_fields, "usage": usage}
        return b"".join(map(_encode_event, [*self._blocks.end(), delta, {"type": "message_stop"}]))

    def fail(self, error: Exception) -> bytes:
        return _encode_event(as_message_error(error_body(error)))

    def _start_event(self, output: RequestOutput) -> Event:
        self._started = True
        self._set_cached(output)
        usage = self._usage(0)
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return {"type": "message_start", "message": message}

    def _add_completion(self, completion: CompletionOutput) -> list[Event]:
        events = self._block_events(self._parser.parse(completion))
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

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (completion,) = output.outputs
        events = self._add_completion(completion)
        self._check()
        content = content_of([*events, *self._blocks.end()])
        self._set_cached(output)
        usage = self._usage(len(completion.token_ids))
        message = self._message(content, self._stop_fields, usage)
        return message | transfer_field(output)

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.call.model.name,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _set_cached(self, output: RequestOutput) -> None:
        if self._api.reports_cache(self._chat.call.hints):
            self._num_cached = output.num_cached_tokens or 0
            self._num_created = output.num_cache_creation_tokens or 0

    def _usage(self, num_output: int) -> dict[str, Any]:
        """Return the token counts of the `usage` field. Cached tokens are counted separately, and not as
        input, with --enable-prompt-tokens-details or if the request has cache hints."""
        usage = {
            "input_tokens": self._chat.call.num_prompt_tokens - self._num_cached - self._num_created,
            "output_tokens": num_output,
            "cache_read_input_tokens": self._num_cached,
            "cache_creation_input_tokens": self._num_created,
        }
        if (control := self._chat.body.cache_control) is None:
            return usage
        created = {f"ephemeral_{ttl}_input_tokens": 0 for ttl in ("5m", "1h")}
        return usage | {
            "cache_creation": created | {f"ephemeral_{control.ttl}_input_tokens": self._num_created}
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
