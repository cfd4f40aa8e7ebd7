"""Encoder of completions, of one prompt or many; the choices are in the order of the prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.data.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from quire.frontend.inputs import Prompt
from quire.server.http.sse import chunk_head, event, quote
from quire.server.openai.api_call import ApiCall
from quire.server.openai.encoder import ChunkEncoder, routed_experts
from quire.server.openai.logprobs import LogprobColumns, prompt_logprobs
from quire.server.openai.requests import CompletionBody
from quire.server.openai.service import GenerationService
from quire.text.tokenizer import Tokenizer

_TAIL = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
_OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class _Echo:
    """The echoed prompt at the beginning of a choice: its text and, for logprobs, its tokens."""

    text: str = ""
    token_ids: Sequence[int] = ()


_NO_ECHO = _Echo()


def _echo(body: CompletionBody, prompt: Prompt, tokenizer: Tokenizer | None) -> _Echo:
    if not body.echo:
        return _NO_ECHO
    text = prompt.text
    if text is None:
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False) if tokenizer is not None else ""
    return _Echo(text, prompt.token_ids)


def _tokens_of(body: CompletionBody, output: CompletionOutput) -> Sequence[int]:
    return () if body.returns_prompt_only else output.token_ids


def _add_logprobs(
    columns: LogprobColumns,
    body: CompletionBody,
    of_prompt: PromptLogprobs | None,
    output: CompletionOutput,
    echo: _Echo,
) -> dict[str, Any]:
    if echo.token_ids:
        columns.add(echo.token_ids, of_prompt or [None] * len(echo.token_ids))
    if not body.returns_prompt_only:
        columns.add(output.token_ids, output.logprobs or [])
    return columns.pop()


class CompletionEncoder(ChunkEncoder):
    """Encoder of completions, as stream chunks or whole. A chunk with only text is concatenated from prepared
    bytes."""

    def __init__(self, api: GenerationService, body: CompletionBody, call: ApiCall) -> None:
        self._body, self._num_per_prompt = body, body.n or 1
        options, num_choices = body.stream_options, self._num_per_prompt * len(call.prompts)
        super().__init__(api, call, object=_OBJECT, options=options, num_choices=num_choices)
        self._prompt_indices = {id: prompt_index for prompt_index, id in enumerate(call.engine_ids())}
        self._num_top = -1 if body.logprob_token_ids is not None else body.logprobs
        """Number of top logprobs per position; -1: all that the engine returned; None: no logprobs."""
        self._is_text_only = self._num_top is None and not (
            body.return_token_ids or self._usage_in_every_chunk
        )
        lead = chunk_head(self._frame)
        self._heads = [lead + b'{"index":%d,"text":' % index for index in range(num_choices)]
        self._cached_by_prompt = [0] * len(call.prompts)
        self._prompt_logprobs: list[PromptLogprobs | None] = [None] * len(call.prompts)
        """Prompt logprobs, which arrive with the first output of each prompt and apply to all of its
        choices."""
        self._is_first = [True] * num_choices
        self._token_formatter = call.model.token_formatter(body.return_tokens_as_token_ids)
        self._columns = [LogprobColumns(self._num_top or 0, self._token_formatter) for _ in self._heads]

    # ---- a stream

    def encode(self, output: RequestOutput) -> bytes:
        prompt_index = self._prompt_indices[output.request_id] if len(self._prompt_indices) > 1 else 0
        self._cached_by_prompt[prompt_index], self._stats = output.num_cached_tokens or 0, output.metrics
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        chunks = []
        for choice in output.outputs:
            index = prompt_index * self._num_per_prompt + choice.index
            self._num_output[index] += len(_tokens_of(self._body, choice))
            is_first, self._is_first[index] = self._is_first[index], False
            if not self._is_text_only or choice.finish_reason is not None or (is_first and self._body.echo):
                if choice.token_ids or choice.finish_reason is not None:
                    chunks.append(self._encode_full(choice, prompt_index, is_first))
            elif choice.text:
                chunks.append(self._heads[index] + quote(choice.text) + _TAIL)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def text_only(self) -> bool:
        return self._is_text_only and len(self._heads) == 1 and not self._body.returns_prompt_only

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        self._num_output[0] += num_tokens
        return self._heads[0] + quote(text) + _TAIL if text else b""

    def _encode_full(self, output: CompletionOutput, prompt_index: int, is_first: bool) -> bytes:
        api, body, index = self._api, self._body, prompt_index * self._num_per_prompt + output.index
        prompt = self._call.prompts[prompt_index]
        echo = _echo(body, prompt, self._call.model.tokenizer) if is_first else _NO_ECHO
        logprobs = None
        if self._num_top is not None:
            logprobs = _add_logprobs(
                self._columns[index], body, self._prompt_logprobs[prompt_index], output, echo
            )
        choice: dict[str, Any] = {
            "index": index,
            "text": echo.text if body.returns_prompt_only else echo.text + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(_tokens_of(body, output))
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        chunk: dict[str, Any] = self._frame | {"choices": [choice]}
        if output.finish_reason is not None:
            chunk["system_fingerprint"] = api.fingerprint
        if self._usage_in_every_chunk:
            chunk["usage"] = api.usage(len(prompt.token_ids), self._num_output[index])
        return event(chunk)

    def _final_usage(self) -> dict[str, Any]:
        self._num_cached = sum(self._cached_by_prompt)
        return super()._final_usage()

    # ---- a whole answer

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        body, choices = self._body, []
        for prompt_index, output in enumerate(outputs):
            echo = _echo(body, self._call.prompts[prompt_index], self._call.model.tokenizer)
            for choice in output.outputs:
                index = prompt_index * self._num_per_prompt + choice.index
                choices.append(self._build_choice(output, choice, echo) | {"index": index})
                self._num_output[index] += len(_tokens_of(body, choice))
            self._cached_by_prompt[prompt_index] = output.num_cached_tokens or 0
        self._stats = outputs[0].metrics
        return self._build_reply(_OBJECT, choices, outputs[0])

    def _build_choice(self, output: RequestOutput, choice: CompletionOutput, echo: _Echo) -> dict[str, Any]:
        body, logprobs = self._body, None
        if self._num_top is not None:
            columns = LogprobColumns(self._num_top, self._token_formatter)
            logprobs = _add_logprobs(columns, body, output.prompt_logprobs, choice, echo)
        token_ids = list(_tokens_of(body, choice)) if body.return_token_ids else None
        return {
            "text": echo.text if body.returns_prompt_only else echo.text + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason or "stop",
            "stop_reason": choice.stop_reason,
            "token_ids": token_ids,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "prompt_token_ids": list(output.prompt_token_ids or ()) if body.return_token_ids else None,
            **routed_experts(choice),
        }
