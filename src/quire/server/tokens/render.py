"""Chats and completions become tokens, and tokens become answers, without the model between: the routes that
end in /render and /derender."""

from collections.abc import Callable
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
from quire.server.openai.chat import ChatEncoder
from quire.server.openai.chat_request import Talk, begin_talk
from quire.server.openai.completions import CompletionEncoder, begin_completion
from quire.server.openai.prompts import off_loop
from quire.server.openai.requests import ChatBody, CompletionBody
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.tokens.answer import told_params
from quire.server.tokens.bodies import (
    DerenderChatBody,
    DerenderChoice,
    DerenderCompletionBody,
    DerenderTokens,
)


async def render_chat(api: GenerationService, body: ChatBody, request: Request) -> Response:
    talk = await begin_talk(api, body, _free(request))
    return await _rendered(api, body, talk.job, lambda prompts: prompts[0])


async def render_completion(api: GenerationService, body: CompletionBody, request: Request) -> Response:
    job = await begin_completion(api, body, _free(request))
    return await _rendered(api, body, job, lambda prompts: prompts)


def _free(request: Request) -> Request:
    """Nothing is asked of the engine: nobody's account is charged."""
    return Request(without_account(request.scope), request.receive)


async def _rendered(
    api: GenerationService,
    body: ChatBody | CompletionBody,
    job: ApiCall,
    answer_of: Callable[[list[dict[str, Any]]], Any],
) -> Response:
    """What the answer is made of is one object for each prompt."""
    if any(prompt.embeds is not None for prompt in job.prompts):
        raise RequestError("`prompt_embeds` are no tokens and cannot be rendered", param="prompt_embeds")
    size = sum(len(prompt.text or "") + len(prompt.token_ids) for prompt in job.prompts)
    inputs = api.inputs_of(job.model)
    return await off_loop(size, lambda: json_response(answer_of(_prompts_of(inputs, body, job))))


def _prompts_of(
    inputs: InputProcessor, body: ChatBody | CompletionBody, job: ApiCall
) -> list[dict[str, Any]]:
    return [
        {
            "request_id": id,
            "token_ids": prompt.token_ids,
            "token_offsets": _offsets(inputs, body, prompt),
            "prompt": prompt.text,
            "sampling_params": told_params(_sampled(params)),
            "model": job.model,
            "stream": bool(body.stream),
            "stream_options": body.stream_options and body.stream_options.model_dump(),
            "cache_salt": prompt.cache_salt,
            "priority": job.priority,
            "features": None if prompt.media is None else _features(prompt.media),
            "kv_transfer_params": None,
        }
        for id, prompt, params in zip(job.engine_ids(), job.prompts, job.params, strict=True)
    ]


def _offsets(
    inputs: InputProcessor, body: ChatBody | CompletionBody, prompt: Prompt
) -> list[tuple[int, int]] | None:
    """Where each token stands in the text, if that is asked for and there is a text that has all of them."""
    if not body.return_token_offsets or prompt.text is None or inputs.tokenizer is None:
        return None
    token_ids, offsets = inputs.tokenizer.offsets(prompt.text, body.add_special_tokens)
    return offsets if token_ids == prompt.token_ids else None


def _features(media: Media) -> dict[str, Any]:
    """The spans of a prompt and what their contents are known by; not these themselves."""
    kinds = dict.fromkeys(item.modality for item in media.items)
    own = {kind: [item for item in media.items if item.modality == kind] for kind in kinds}
    return {
        "mm_hashes": {kind: [item.key.hex() for item in items] for kind, items in own.items()},
        "mm_placeholders": {
            kind: [{"offset": item.offset, "length": item.length} for item in items]
            for kind, items in own.items()
        },
    }


def _sampled(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(
            "a beam search is not one request and cannot be rendered; leave use_beam_search out",
            param="use_beam_search",
        )
    return params


# ---- and back

_WHOLE = {"stream": False, "stream_options": None}
"""However it was asked for, the answer is here."""


async def derender_chat(api: GenerationService, body: DerenderChatBody, request: Request) -> Response:
    given, asked, request = body.generate_response, body.chat_request, _free(request)
    await _check(api, body, [given])
    if asked is not None:
        talk = await begin_talk(api, asked.model_copy(update=_WHOLE), request)
    else:
        asked = ChatBody(messages=[{"role": "user", "content": ""}])  # type: ignore[list-item, call-arg]
        job = api.job("chatcmpl", body, request, [Prompt([])], [SamplingParams()])
        talk = Talk(asked, job, api.settings.api.response_role, "")
    _check_choices([given], asked.n or 1)
    output = await _read(api.inputs_of(talk.job.model), given, _sampled(talk.job.params[0]))
    encoder = ChatEncoder(api, talk)

    def written() -> Response:
        answer = encoder.whole([output])
        for choice, tokens in zip(answer["choices"], given.choices, strict=True):
            choice["logprobs"] = tokens.logprobs and tokens.logprobs.model_dump()
        return json_response(_counted(answer, body.prompt_tokens or 0))

    return await off_loop(_num_chars([output]), written)


async def derender_completion(
    api: GenerationService, body: DerenderCompletionBody, request: Request
) -> Response:
    given, asked, request = body.generate_responses, body.completion_request, _free(request)
    await _check(api, body, given)
    if body.prompt_tokens is not None and len(body.prompt_tokens) != len(given):
        raise RequestError(
            f"prompt_tokens length ({len(body.prompt_tokens)}) must equal generate_responses length "
            f"({len(given)})",
            param="prompt_tokens",
        )
    if asked is not None:
        # Logprobs have come in the words of a chat, if at all.
        asked = asked.model_copy(update={**_WHOLE, "logprobs": None})
        job = await begin_completion(api, asked, request)
    else:
        asked = CompletionBody(prompt="")  # type: ignore[call-arg]
        prompts = [Prompt([]) for _ in given]
        job = api.job("cmpl", body, request, prompts, [SamplingParams()] * len(prompts))
    if len(job.prompts) != len(given):
        raise RequestError(
            f"{len(given)} generate_responses for {len(job.prompts)} prompts", param="generate_responses"
        )
    _check_choices(given, asked.n or 1)
    inputs = api.inputs_of(job.model)
    read = [
        await _read(inputs, each, _sampled(params)) for each, params in zip(given, job.params, strict=True)
    ]
    encoder, num_prompt = CompletionEncoder(api, asked, job), sum(body.prompt_tokens or ())
    return await off_loop(_num_chars(read), lambda: json_response(_counted(encoder.whole(read), num_prompt)))


async def _check(
    api: GenerationService, body: DerenderChatBody | DerenderCompletionBody, given: list[DerenderTokens]
) -> None:
    await api.check_model(body.model, pools=False)
    if body.stream:
        raise RequestError("parts of a stream cannot be derendered; send the whole answer", param="stream")
    size, limit = max(map(_longest, given)), api.engine.inputs.max_model_len
    if size > limit:
        raise RequestError(
            f"an answer has {size} tokens, and this model's maximum context length is {limit} tokens",
            param="token_ids",
        )


def _longest(given: DerenderTokens) -> int:
    return max((len(choice.token_ids or ()) for choice in given.choices), default=0)


def _check_choices(given: list[DerenderTokens], num_choices: int) -> None:
    wrong = [each.index for reply in given for each in reply.choices if each.index >= num_choices]
    if wrong:
        raise RequestError(f"there is a choice {wrong[0]}, and {num_choices} asked for", param="choices")
    most = max(len(reply.choices) for reply in given)
    if most > num_choices:
        raise RequestError(f"there are {most} choices, and {num_choices} asked for", param="choices")


async def _read(inputs: InputProcessor, given: DerenderTokens, params: SamplingParams) -> RequestOutput:
    """The answer that the engine gave, with its text."""
    size = sum(len(choice.token_ids or ()) for choice in given.choices)
    outputs = await off_loop(size, lambda: [_choice(inputs, each, params) for each in given.choices])
    return RequestOutput("", None, [], None, outputs, finished=True)


def _num_chars(outputs: list[RequestOutput]) -> int:
    return sum(len(choice.text) for output in outputs for choice in output.outputs)


def _choice(inputs: InputProcessor, given: DerenderChoice, params: SamplingParams) -> CompletionOutput:
    tokenizer, ids, vocab = inputs.tokenizer, given.token_ids or [], inputs.vocab
    if tokenizer is None:
        raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
    if ids and max(ids) >= vocab:
        raise RequestError(
            f"Token id {max(ids)} is out of vocabulary: ids of this model are 0 to {vocab - 1}",
            param="token_ids",
        )
    stops = {*inputs.eos_ids, *(params.stop_token_ids or ())}
    stopped = given.finish_reason == "stop"
    shown = ids[:-1] if stopped and ids and ids[-1] in stops else ids
    text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    stop_reason = None
    for stop in params.stop or () if stopped else ():
        before, found, _ = text.partition(stop)
        if found:
            stop_reason = stop
            text = before + stop if params.include_stop_str_in_output else before
    return CompletionOutput(
        given.index,
        text,
        ids,
        None,
        None,
        finish_reason=given.finish_reason or "stop",
        stop_reason=stop_reason,
    )


def _counted(found: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    usage = found["usage"]
    usage |= {"prompt_tokens": num_prompt, "total_tokens": num_prompt + usage["completion_tokens"]}
    return found
