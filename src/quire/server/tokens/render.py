"""The /render and /derender routes: conversion of chats and completions to tokens, and of tokens to
replies, without running the model."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.data.multimodal import Media
from quire.data.outputs import CompletionOutput, RequestOutput
from quire.data.params import SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import InputProcessor, Prompt
from quire.server.http.errors import json_response
from quire.server.http.limits import without_account
from quire.server.openai.api_call import ApiCall, new_call
from quire.server.openai.chat import prepare_chat
from quire.server.openai.chat_encoder import ChatEncoder
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.completion_encoder import CompletionEncoder
from quire.server.openai.completions import begin_completion
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.requests import ChatBody, CompletionBody
from quire.server.openai.service import GenerationService, limit_long_bodies
from quire.server.openai.work_size import off_loop
from quire.server.tokens.answer import public_params
from quire.server.tokens.bodies import (
    DerenderChatBody,
    DerenderChoice,
    DerenderCompletionBody,
    DerenderTokens,
)


@limit_long_bodies
async def show_chat_prompt(api: GenerationService, body: ChatBody, request: Request) -> Response:
    """Return the tokens and parameters that a chat would send to the engine."""
    chat = await prepare_chat(api, body, without_account(request))
    return await _render(body, chat.call, lambda prompts: prompts[0])


@limit_long_bodies
async def show_completion_prompts(api: GenerationService, body: CompletionBody, request: Request) -> Response:
    """Return the tokens and parameters that each prompt would send to the engine."""
    call = await begin_completion(api, body, without_account(request))
    return await _render(body, call, lambda prompts: prompts)


async def _render(
    body: ChatBody | CompletionBody,
    call: ApiCall,
    body_of: Callable[[list[dict[str, Any]]], Any],
) -> Response:
    """Render the prompts of a call, one dict per prompt, and return what `body_of` makes of the list."""
    if any(prompt.embeds is not None for prompt in call.prompts):
        raise RequestError("`prompt_embeds` have no token ids and cannot be rendered", param="prompt_embeds")
    size = sum(len(prompt.text or "") + len(prompt.token_ids) for prompt in call.prompts)
    return await off_loop(size, lambda: json_response(body_of(_rendered_prompts(body, call))))


def _rendered_prompts(body: ChatBody | CompletionBody, call: ApiCall) -> list[dict[str, Any]]:
    return [
        {
            "request_id": id,
            "token_ids": prompt.token_ids,
            "token_offsets": _offsets(call.model.inputs, body, prompt),
            "prompt": prompt.text,
            "sampling_params": public_params(_sampling_params(params)),
            "model": call.model.name,
            "stream": bool(body.stream),
            "stream_options": body.stream_options and body.stream_options.model_dump(),
            "cache_salt": prompt.cache_salt,
            "priority": call.priority,
            "features": None if prompt.media is None else _features(prompt.media),
            "kv_transfer_params": None,
        }
        for id, prompt, params in zip(call.engine_ids(), call.prompts, call.params, strict=True)
    ]


def _offsets(
    inputs: InputProcessor, body: ChatBody | CompletionBody, prompt: Prompt
) -> list[tuple[int, int]] | None:
    """Return the (start, end) character indices of each token in the prompt's text; None if they were not
    requested or the text encodes to other tokens."""
    if not body.return_token_offsets or prompt.text is None or inputs.tokenizer is None:
        return None
    token_ids, offsets = inputs.tokenizer.offsets(prompt.text, body.add_special_tokens)
    return offsets if token_ids == prompt.token_ids else None


def _features(media: Media) -> dict[str, Any]:
    """Return, by modality, the placeholder positions in the prompt and the hashes of the media items."""
    kinds = dict.fromkeys(item.modality for item in media.items)
    by_kind = {kind: [item for item in media.items if item.modality == kind] for kind in kinds}
    return {
        "mm_hashes": {kind: [item.key.hex() for item in items] for kind, items in by_kind.items()},
        "mm_placeholders": {
            kind: [{"offset": item.offset, "length": item.length} for item in items]
            for kind, items in by_kind.items()
        },
    }


def _sampling_params(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(
            "beam search cannot be rendered, since it is several requests; leave use_beam_search out",
            param="use_beam_search",
        )
    return params


# ---- derender

_NOT_STREAMED = {"stream": False, "stream_options": None}
"""Updates of a request body: a derendered reply is never streamed."""


@limit_long_bodies
async def show_chat_answer(api: GenerationService, body: DerenderChatBody, request: Request) -> Response:
    """Convert generated tokens to the reply of a chat."""
    tokens_reply, chat_body, request = body.generate_response, body.chat_request, without_account(request)
    model = await _find_model(api, body, request, [tokens_reply])
    if chat_body is not None:
        chat = await prepare_chat(api, chat_body.model_copy(update=_NOT_STREAMED), request)
    else:
        chat_body = ChatBody(messages=[{"role": "user", "content": ""}])  # type: ignore[list-item, call-arg]
        call = new_call(api, "chatcmpl", body, request, model, [Prompt([])], [SamplingParams()])
        chat = ChatRequest(chat_body, call, api.settings.api.response_role, "")
    _check_choices([tokens_reply], chat_body.n or 1)
    output = await _decode_reply(chat.call.model.inputs, tokens_reply, _sampling_params(chat.call.params[0]))
    encoder = ChatEncoder(api, chat)

    def encode() -> Response:
        answer = encoder.response_body([output])
        for choice, tokens in zip(answer["choices"], tokens_reply.choices, strict=True):
            choice["logprobs"] = tokens.logprobs and tokens.logprobs.model_dump()
        return json_response(_with_usage(answer, body.prompt_tokens or 0))

    return await off_loop(_num_chars([output]), encode)


@limit_long_bodies
async def show_completion_answer(
    api: GenerationService, body: DerenderCompletionBody, request: Request
) -> Response:
    """Convert generated tokens to the reply of a completion."""
    replies, completion, request = body.generate_responses, body.completion_request, without_account(request)
    model = await _find_model(api, body, request, replies)
    if body.prompt_tokens is not None and len(body.prompt_tokens) != len(replies):
        raise RequestError(
            f"prompt_tokens length ({len(body.prompt_tokens)}) must equal generate_responses length "
            f"({len(replies)})",
            param="prompt_tokens",
        )
    if completion is not None:
        # Logprobs of /inference/v1/generate have the chat format and are not converted.
        completion = completion.model_copy(update={**_NOT_STREAMED, "logprobs": None})
        call = await begin_completion(api, completion, request)
    else:
        completion = CompletionBody(prompt="")  # type: ignore[call-arg]
        prompts = [Prompt([]) for _ in replies]
        call = new_call(api, "cmpl", body, request, model, prompts, [SamplingParams()] * len(prompts))
    if len(call.prompts) != len(replies):
        raise RequestError(
            f"{len(replies)} generate_responses for {len(call.prompts)} prompts", param="generate_responses"
        )
    _check_choices(replies, completion.n or 1)
    outputs = [
        await _decode_reply(call.model.inputs, reply, _sampling_params(params))
        for reply, params in zip(replies, call.params, strict=True)
    ]
    encoder, num_prompt = CompletionEncoder(api, completion, call), sum(body.prompt_tokens or ())
    return await off_loop(
        _num_chars(outputs), lambda: json_response(_with_usage(encoder.response_body(outputs), num_prompt))
    )


async def _find_model(
    api: GenerationService,
    body: DerenderChatBody | DerenderCompletionBody,
    request: Request,
    replies: list[DerenderTokens],
) -> RequestedModel:
    """Return the model of a request, and check that it can have generated the replies."""
    model = await api.names.find(body.model, request, pools=False)
    if body.stream:
        raise RequestError("stream chunks cannot be derendered; send the whole reply", param="stream")
    sizes = (len(choice.token_ids or ()) for reply in replies for choice in reply.choices)
    size, limit = max(sizes, default=0), model.inputs.max_model_len
    if size > limit:
        raise RequestError(
            f"a choice has {size} tokens, but this model's maximum context length is {limit} tokens",
            param="token_ids",
        )
    return model


def _check_choices(replies: list[DerenderTokens], num_choices: int) -> None:
    for reply in replies:
        indices, count = [choice.index for choice in reply.choices], len(reply.choices)
        if (index := max(indices, default=0)) >= num_choices:
            raise RequestError(
                f"choice index {index} is out of range: the request has n={num_choices}", param="choices"
            )
        if count > num_choices:
            raise RequestError(
                f"there are {count} choices, but the request has n={num_choices}", param="choices"
            )


async def _decode_reply(
    inputs: InputProcessor, reply: DerenderTokens, params: SamplingParams
) -> RequestOutput:
    """Decode the tokens of a reply and return it as an output of the engine."""
    size = sum(len(choice.token_ids or ()) for choice in reply.choices)
    outputs = await off_loop(
        size, lambda: [_decode_choice(inputs, choice, params) for choice in reply.choices]
    )
    return RequestOutput("", None, [], None, outputs, finished=True)


def check_vocab(token_ids: Sequence[int], vocab: int, *, param: str) -> None:
    if token_ids and (largest := max(token_ids)) >= vocab:
        raise RequestError(
            f"Token id {largest} is out of vocabulary: ids of this model are 0 to {vocab - 1}", param=param
        )


def _num_chars(outputs: list[RequestOutput]) -> int:
    return sum(len(choice.text) for output in outputs for choice in output.outputs)


def _decode_choice(
    inputs: InputProcessor, choice: DerenderChoice, params: SamplingParams
) -> CompletionOutput:
    tokenizer, ids = inputs.tokenizer, choice.token_ids or []
    if tokenizer is None:
        raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
    check_vocab(ids, inputs.vocab, param="token_ids")
    stops = {*inputs.eos_ids, *(params.stop_token_ids or ())}
    stopped = choice.finish_reason == "stop"
    visible = ids[:-1] if stopped and ids and ids[-1] in stops else ids
    text = tokenizer.decode(visible, skip_special_tokens=params.skip_special_tokens)
    stop_reason = None
    for stop in params.stop or () if stopped else ():
        before, separator, _ = text.partition(stop)
        if separator:
            stop_reason = stop
            text = before + stop if params.include_stop_str_in_output else before
    return CompletionOutput(
        choice.index,
        text,
        ids,
        None,
        None,
        finish_reason=choice.finish_reason or "stop",
        stop_reason=stop_reason,
    )


def _with_usage(reply: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    usage = reply["usage"]
    usage |= {"prompt_tokens": num_prompt, "total_tokens": num_prompt + usage["completion_tokens"]}
    return reply
