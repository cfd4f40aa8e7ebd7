"""/v1/chat/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.data.params import BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.server.asked import (
    beam_params,
    chat_num_logprobs,
    check_chat,
    check_generate,
    sampling_params,
)
from quire.server.errors import json_response
from quire.server.generate import Api, Job
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.prompts import as_dict
from quire.server.requests import ChatBody
from quire.server.sse import EventStream, event, opening, quote

_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


async def answer_chat(api: Api, body: ChatBody, request: Request) -> Response:
    api.check_model(body.model, pools=False)
    check_generate(body, max_n=api.settings.api.max_n)
    check_chat(body, trust_template=api.settings.api.trust_request_chat_template)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = await api.reader.of_chat(body, asked)
    params = _params(api, body, api.output_limit(asked, len(prompt.token_ids)))
    job = api.job("chatcmpl", body, request, [prompt], [params])
    if body.stream:
        chunks = ChatChunks(api, body, job)
        outputs = await api.streamed(job)
        return EventStream(outputs, chunks=chunks, answering=api.answering)
    (output,) = await api.answering.until_gone(request.receive, api.finished(job))
    return json_response(_reply(api, body, job, output))


def _params(api: Api, body: ChatBody, max_tokens: int) -> SamplingParams | BeamSearchParams:
    facts = api.engine.facts
    if body.use_beam_search:
        return beam_params(body, facts, max_tokens=max_tokens)
    if body.logprob_token_ids is not None and not body.logprobs:
        raise RequestError(
            "when using `logprob_token_ids`, `logprobs` must be set to true.", param="logprob_token_ids"
        )
    return sampling_params(
        body,
        facts,
        max_tokens=max_tokens,
        logprobs=chat_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )


def _role(api: Api, body: ChatBody) -> str:
    return api.settings.api.response_role if body.add_generation_prompt else body.messages[-1].role


def _echoed(api: Api, body: ChatBody) -> str:
    """The last message, when it is the beginning of the answer and asked to be repeated."""
    last = as_dict(body.messages[-1])
    content = last.get("content")
    return content if body.echo and last["role"] == _role(api, body) and isinstance(content, str) else ""


def _logprobs(api: Api, body: ChatBody, output: CompletionOutput) -> dict[str, Any] | None:
    if not body.logprobs or output.logprobs is None:
        return None
    num_top = -1 if body.logprob_token_ids is not None else body.top_logprobs or 0
    return chat_logprobs(output.token_ids, output.logprobs, num_top, api.speller(body))


def _reply(api: Api, body: ChatBody, job: Job, output: RequestOutput) -> dict[str, Any]:
    echoed, role = _echoed(api, body), _role(api, body)
    ids = output.prompt_token_ids or []
    choices = [
        {
            "index": each.index,
            "message": {
                "role": role,
                "content": echoed + each.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": _logprobs(api, body, each),
            "finish_reason": each.finish_reason or "stop",
            "stop_reason": each.stop_reason,
            "token_ids": list(each.token_ids) if body.return_token_ids else None,
        }
        for each in output.outputs
    ]
    num_output = sum(len(each.token_ids) for each in output.outputs)
    return {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": api.fingerprint,
        "usage": api.usage(len(ids), num_output, output.num_cached_tokens),
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "prompt_token_ids": list(ids) if body.return_token_ids else None,
        "prompt_text": output.prompt if body.return_prompt_text else None,
        "kv_transfer_params": None,
    }


class ChatChunks:
    """One streamed answer as events. A chunk with nothing but text is three pieces put together."""

    def __init__(self, api: Api, body: ChatBody, job: Job) -> None:
        self._api, self._body, self._job = api, body, job
        forced = api.settings.api.enable_force_include_usage
        options = body.stream_options
        self._usage = forced or bool(options and options.include_usage)
        self._every = forced or (self._usage and bool(options and options.continuous_usage_stats))
        self._plain = not (body.logprobs or body.return_token_ids or self._every)
        self._frame = {
            "id": job.id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.model,
        }
        lead = opening(self._frame)
        self._heads = [lead + b'{"index":%d,"delta":{"content":' % index for index in range(body.n or 1)]
        self._num_output = [0] * (body.n or 1)
        self._num_prompt = len(job.prompts[0].token_ids)
        self._num_cached: int | None = None
        self._started = False

    def encode(self, output: RequestOutput) -> bytes:
        chunks = [] if self._started else [self._opening(output)]
        for each in output.outputs:
            self._num_output[each.index] += len(each.token_ids)
            if not self._plain or each.finish_reason is not None:
                if each.token_ids or each.finish_reason is not None:
                    chunks.append(self._full(each))
            elif each.text:
                chunks.append(self._heads[each.index] + quote(each.text) + _TAIL)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def text_only(self) -> bool:
        return self._plain and len(self._heads) == 1

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        self._num_output[0] += num_tokens
        return self._heads[0] + quote(text) + _TAIL if text else b""

    def _opening(self, output: RequestOutput) -> bytes:
        """The role of every choice, before anything else."""
        self._started = True
        self._num_cached = output.num_cached_tokens
        body, chunks = self._body, []
        first: dict[str, Any] = {}
        if body.return_token_ids:
            first["prompt_token_ids"] = self._job.prompts[0].token_ids
        if body.return_prompt_text:
            first["prompt_text"] = self._job.prompts[0].text
        echoed = _echoed(self._api, body)
        for index in range(len(self._heads)):
            delta = {"role": _role(self._api, body), "content": ""}
            chunks.append(self._event([_choice(index, delta)], index, **first))
            if echoed:
                chunks.append(self._event([_choice(index, {"content": echoed})], index))
        return b"".join(chunks)

    def _full(self, each: CompletionOutput) -> bytes:
        logprobs = _logprobs(self._api, self._body, each)
        choice = _choice(each.index, {"content": each.text}, logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = list(each.token_ids)
        extra = {}
        if each.finish_reason is not None:
            choice["finish_reason"] = each.finish_reason
            choice["stop_reason"] = each.stop_reason
            extra["system_fingerprint"] = self._api.fingerprint
        return self._event([choice], each.index, **extra)

    def _event(self, choices: list[dict[str, Any]], index: int, **extra: Any) -> bytes:
        if self._every:
            extra["usage"] = self._api.usage(self._num_prompt, self._num_output[index])
        return event(self._frame | {"choices": choices} | extra)

    def finish(self) -> bytes:
        if not self._usage:
            return b""
        usage = self._api.usage(self._num_prompt, sum(self._num_output), self._num_cached)
        ending = {"choices": [], "usage": usage, "system_fingerprint": self._api.fingerprint}
        return event(self._frame | ending)


def _choice(index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
