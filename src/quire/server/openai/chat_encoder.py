"""Encoder of chat completions."""

from typing import Any

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.data.outputs import CompletionOutput, RequestOutput
from quire.server.http.sse import chunk_head, event, quote
from quire.server.openai.answer_pieces import NAMED, CollectedAnswer, collect_pieces
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.encoder import ChunkEncoder, routed_experts
from quire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.server.openai.service import GenerationService

_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatEncoder(ChunkEncoder):
    """Encoder of chat completions, as stream chunks or whole. A chunk with only text is concatenated from
    prepared bytes."""

    def __init__(self, api: GenerationService, chat: ChatRequest) -> None:
        self._chat, self._body = chat, chat.body
        body, num_choices = chat.body, chat.body.n or 1
        options = body.stream_options
        kind = "chat.completion.chunk"
        super().__init__(api, chat.call, object=kind, options=options, num_choices=num_choices)
        self._has_token_fields = bool(body.logprobs or body.return_token_ids or self._usage_in_every_chunk)
        """Whether chunks carry logprobs, token ids or usage, and not only text."""
        self._counts_reasoning = chat.format.reasoning is not None
        """Whether the usage reports the number of reasoning tokens."""
        self._is_text_only = not (chat.parses or self._has_token_fields)
        lead = chunk_head(self._frame)
        self._leads = [lead + b'{"index":%d,"delta":{' % index for index in range(num_choices)]
        self._heads = [lead + b'"content":' for lead in self._leads]
        self._parsers = [chat.parser() for _ in range(num_choices)]
        self._has_calls = [False] * num_choices
        """Whether each choice has called a tool."""
        self._token_formatter = chat.call.model.token_formatter(body.return_tokens_as_token_ids)
        self._started = False

    # ---- a stream

    def encode(self, output: RequestOutput) -> bytes:
        chunks = [] if self._started else [self._encode_roles(output)]
        self._stats = output.metrics
        for choice in output.outputs:
            self._num_output[choice.index] += len(choice.token_ids)
            if not self._is_text_only or choice.finish_reason is not None:
                if choice.token_ids or choice.finish_reason is not None:
                    chunks.append(self._encode_full(choice))
            elif choice.text:
                chunks.append(self._heads[choice.index] + quote(choice.text) + _TAIL)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def text_only(self) -> bool:
        return len(self._heads) == 1 and not (
            self._has_token_fields or (self._usage and self._counts_reasoning)
        )

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        self._num_output[0] += num_tokens
        if self._is_text_only:
            return self._heads[0] + quote(text) + _TAIL if text else b""
        return self._encode_pieces(0, self._parsers[0].parse_text(text))

    def _encode_pieces(self, index: int, pieces: list[Piece]) -> bytes:
        """Return one chunk per piece, without logprobs, token ids or usage."""
        chunks = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    chunks.append(self._heads[index] + quote(text) + _TAIL)
                case ReasoningPiece(text):
                    chunks.append(self._leads[index] + b'"reasoning":' + quote(text) + _TAIL)
                case ToolArguments(call, text):
                    head = b'"tool_calls":[{"index":%d,"function":{"arguments":' % call
                    chunks.append(self._leads[index] + head + quote(text) + b"}}]" + _TAIL)
                case ToolStart():
                    self._has_calls[index] = True
                    chunks.append(self._encode_event([_choice(index, _delta(piece))], index))
        return b"".join(chunks)

    def _encode_roles(self, output: RequestOutput) -> bytes:
        """Return the first chunks, with the role of every choice."""
        self._started = True
        self._set_cached(output)
        body, chunks = self._body, []
        first: dict[str, Any] = {}
        if body.return_token_ids:
            first["prompt_token_ids"] = self._call.prompts[0].token_ids
        if body.return_prompt_text:
            first["prompt_text"] = self._call.prompts[0].text
        for index in range(len(self._heads)):
            delta = {"role": self._chat.role, "content": ""}
            chunks.append(self._encode_event([_choice(index, delta)], index, **first))
            if self._chat.echoed:
                chunks.append(self._encode_event([_choice(index, {"content": self._chat.echoed})], index))
        return b"".join(chunks)

    def _encode_full(self, output: CompletionOutput) -> bytes:
        """Return one chunk per piece; the last one carries logprobs, token ids and finish reason."""
        index = output.index
        pieces = self._parsers[index].parse(output)
        if not self._has_token_fields and output.finish_reason is None:
            return self._encode_pieces(index, pieces)
        self._has_calls[index] |= any(isinstance(piece, ToolStart) for piece in pieces)
        deltas = [_delta(piece) for piece in pieces]
        *before, last = deltas or [{} if self._chat.parses else {"content": ""}]
        choice = _choice(index, last, self._logprobs(output))
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        extra = {}
        if output.finish_reason is not None:
            choice["finish_reason"] = self._finish_reason(output, calls=self._has_calls[index])
            choice["stop_reason"] = output.stop_reason
            extra["system_fingerprint"] = self._api.fingerprint
        chunks = [self._encode_event([_choice(index, delta)], index) for delta in before]
        return b"".join(chunks) + self._encode_event([choice], index, **extra)

    def _encode_event(self, choices: list[dict[str, Any]], index: int, **extra: Any) -> bytes:
        if self._usage_in_every_chunk:
            extra["usage"] = self._api.usage(self._num_prompt, self._num_output[index])
        return event(self._frame | {"choices": choices} | extra)

    def _final_usage(self) -> dict[str, Any]:
        usage = super()._final_usage()
        media = self._call.prompts[0].media
        if media is not None and "prompt_tokens_details" in usage:
            usage["prompt_tokens_details"]["multimodal_tokens"] = media.num_tokens()
        if self._counts_reasoning:
            num_reasoning = sum(parser.num_reasoning for parser in self._parsers)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _set_cached(self, output: RequestOutput) -> None:
        self._num_cached, self._num_created = output.num_cached_tokens, output.num_cache_creation_tokens

    # ---- a whole answer

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._set_cached(output)
        self._stats = output.metrics
        body = self._body
        for choice in output.outputs:
            self._num_output[choice.index] += len(choice.token_ids)
        return self._build_reply(
            "chat.completion",
            [self._build_choice(choice) for choice in output.outputs],
            output,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=list(output.prompt_token_ids or ()) if body.return_token_ids else None,
            prompt_text=output.prompt if body.return_prompt_text else None,
        )

    def _build_choice(self, output: CompletionOutput) -> dict[str, Any]:
        answer = collect_pieces(self._parsers[output.index].parse(output))
        return {
            "index": output.index,
            "message": _message(self._chat, answer),
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output, calls=bool(answer.calls)),
            "stop_reason": output.stop_reason,
            "token_ids": list(output.token_ids) if self._body.return_token_ids else None,
            **routed_experts(output),
        }

    def _finish_reason(self, output: CompletionOutput, *, calls: bool) -> str:
        """Return the finish reason. If a tool was called it is `tool_calls`, but `stop` if the request named
        the tool to call, as in OpenAI's API."""
        reason = output.finish_reason or "stop"
        return "tool_calls" if calls and reason == "stop" and self._chat.tools.calls != NAMED else reason

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        body = self._body
        if not body.logprobs or output.logprobs is None:
            return None
        num_top = -1 if body.logprob_token_ids is not None else body.top_logprobs or 0
        return chat_logprobs(output.token_ids, output.logprobs, num_top, self._token_formatter)


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case TextPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning": text}
        case ToolStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(chat: ChatRequest, answer: CollectedAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": chat.role,
        "content": (chat.echoed + answer.text) or (None if answer.calls or answer.reasoning else ""),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": answer.reasoning or None,
    }
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message
