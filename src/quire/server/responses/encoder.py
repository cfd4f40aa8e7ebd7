"""Encoding of a response, as stream events or whole."""

import time
from collections.abc import Callable
from typing import Any

from quire.data.output_pieces import TextPiece
from quire.data.outputs import CompletionOutput, RequestOutput
from quire.data.params import SamplingParams
from quire.errors import RequestError
from quire.server.http.errors import error_body
from quire.server.http.sse import AnswerEncoder, event, quote
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.encoder import transfer_field
from quire.server.openai.logprobs import chat_logprobs
from quire.server.openai.service import GenerationService
from quire.server.responses.bodies import ResponseBody
from quire.server.responses.output import Event, ResponseItems

_STATUSES = {"length": "incomplete", "abort": "cancelled", "error": "failed"}
"""Status of a response that did not complete, by the engine's finish reason."""
_EVENTS = {"cancelled": "incomplete"}
"""Name of the last event by status, where the name differs from the status."""


class ResponseEncoder(AnswerEncoder):
    """Encoder of a /v1/responses reply, as stream events or whole. Sequence numbers of the events have no
    gaps."""

    def __init__(
        self,
        api: GenerationService,
        chat: ChatRequest,
        frame: dict[str, Any],
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        """Create an encoder. `frame`: the response's fields that do not change. `on_end` is called with the
        final response."""
        self._api, self._chat, self._frame, self._on_end = api, chat, frame, on_end
        self.status = "queued"
        self._final_status = "completed"
        """Status that the response will have at its end."""
        self._error: dict[str, Any] | None = None
        self._output = ResponseItems()
        self._parser = chat.parser()
        self._has_logprobs = bool(chat.body.logprobs)
        self._num_events = 0
        self._num_output = self._num_cached = self._num_created = 0
        self._delta = b""
        """Encoded head of a text delta event, up to its sequence number."""

    def as_dict(self) -> dict[str, Any]:
        """Return the response in its present state."""
        has_ended = self.status not in ("queued", "in_progress")
        incomplete_details = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return self._frame | {
            "status": self.status,
            "error": self._error,
            "incomplete_details": incomplete_details,
            "output": self._output.as_list(),
            "usage": self._usage() if has_ended else None,
            "completed_at": int(time.time()) if self.status == "completed" else None,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt, timeline = self._chat.call.num_prompt_tokens, self._chat.call.timeline
        timeline_field = (
            {} if timeline is None or timeline.timings is None else {"timeline": timeline.timings}
        )
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": self._num_cached,
                "cache_write_tokens": self._num_created,
            },
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning},
            "total_tokens": num_prompt + self._num_output,
            **timeline_field,
        }

    # ---- streaming

    def encode(self, output: RequestOutput) -> bytes:
        return b"".join(self.events(output))

    def events(self, output: RequestOutput) -> list[bytes]:
        return [self._encode_event(body) for body in self.add_output(output)]

    @property
    def text_only(self) -> bool:
        return not (self._chat.parses or self._has_logprobs)

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        self._num_output += num_tokens
        if not text:
            return b""
        self._output.append(text)
        if not self._delta:
            head = event(self._output.delta_head()).removesuffix(b"}\n\n")
            self._delta = b"event: response.output_text.delta\n" + head + b',"sequence_number":'
        number, self._num_events = self._num_events, self._num_events + 1
        return self._delta + b"%d" % number + b',"delta":' + quote(text) + b"}\n\n"

    def finish(self) -> bytes:
        return b"".join(self.last_events())

    def last_events(self) -> list[bytes]:
        """Return the events that end the stream."""
        return [self._encode_event(self._end())]

    def fail(self, error: Exception) -> bytes:
        return b"".join(self.failure_events(error))

    def failure_events(self, error: Exception, status: str = "failed") -> list[bytes]:
        """Return the last events of a response that failed or was cancelled."""
        events = [*self._begin(), *self._output.end("incomplete")]
        self._final_status = status
        if status == "failed":
            code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
            self._error = {"code": code, "message": error_body(error)["error"]["message"]}
        return [self._encode_event(body) for body in (*events, self._end())]

    def _encode_event(self, body: Event) -> bytes:
        body["sequence_number"] = self._num_events
        encoded = f"event: {body['type']}\n".encode() + event(body)
        self._num_events += 1
        return encoded

    # ---- whole response

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self.add_output(output)
        return self.final_response() | transfer_field(output)

    def final_response(self) -> dict[str, Any]:
        """Return the response after all outputs were passed to `add_output`."""
        response: dict[str, Any] = self._end()["response"]
        return response

    # ---- events of an output

    def add_output(self, output: RequestOutput) -> list[Event]:
        """Add an output of the engine and return the events that it causes."""
        events = self._begin(output)
        if self._chat.call.timeline is not None:
            self._chat.call.timeline.add_output(output)
        (completion,) = output.outputs
        self._num_output += len(completion.token_ids)
        if not self._chat.parses:
            events += self._output.begin("message")
        pieces = self._parser.parse(completion)
        logprobs = self._logprobs(completion)
        texts = [index for index, piece in enumerate(pieces) if isinstance(piece, TextPiece)]
        last_text = texts[-1] if texts else None
        if last_text is None and self._output.open_type == "message":
            self._output.add_logprobs(logprobs)
        for index, piece in enumerate(pieces):
            events += self._output.add(piece, logprobs if index == last_text else ())
        if completion.finish_reason is not None:
            self._final_status = _STATUSES.get(completion.finish_reason, "completed")
            if self._final_status == "failed":
                self._error = {
                    "code": "server_error",
                    "message": "the engine failed while generating this response",
                }
            if not self._output.as_list():
                events += self._output.begin("message")
            events += self._output.end("completed" if self._final_status == "completed" else "incomplete")
        return events

    def _begin(self, output: RequestOutput | None = None) -> list[Event]:
        if self.status != "queued":
            return []
        self.status = "in_progress"
        self._num_cached = (output and output.num_cached_tokens) or 0
        self._num_created = (output and output.num_cache_creation_tokens) or 0
        names = ("response.created", "response.in_progress")
        return [{"type": name, "response": self.as_dict()} for name in names]

    def _end(self) -> Event:
        self.status = self._final_status
        response = self.as_dict()
        self._on_end(response)
        return {"type": f"response.{_EVENTS.get(self.status, self.status)}", "response": response}

    def _logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        if not self._has_logprobs or output.logprobs is None:
            return []
        body = self._chat.body
        token_formatter = self._chat.call.model.token_formatter(body.return_tokens_as_token_ids)
        num_top = -1 if body.logprob_token_ids is not None else body.top_logprobs or 0
        logprobs = chat_logprobs(output.token_ids, output.logprobs, num_top, token_formatter)
        content: list[dict[str, Any]] = logprobs["content"]
        return content


def fixed_fields(body: ResponseBody, chat: ChatRequest, id: str, *, stored: bool) -> dict[str, Any]:
    """Return the response's fields that repeat the request and do not change while it runs."""
    (params,) = chat.call.params
    assert isinstance(params, SamplingParams)
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    reasoning = body.reasoning
    return {
        "id": id,
        "object": "response",
        "created_at": chat.call.created,
        "model": chat.call.model.name,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None} | tool for tool in body.tools or []],
        "background": bool(body.background),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier,
        "store": stored,
        "text": {"format": {"type": "text"}} | text,
        "top_logprobs": body.top_logprobs,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
