"""/inference/v1/generate: tokens in, tokens out."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.data.params import ReasoningIds, RequestOutputKind, SamplingParams
from quire.errors import RequestError
from quire.server.http.errors import InvalidBody
from quire.server.http.sse import DONE, AnswerEncoder, event
from quire.server.openai.api_call import ApiCall, new_call
from quire.server.openai.encoder import routed_experts
from quire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.requests import CompletionBody
from quire.server.openai.run_call import answer_call
from quire.server.openai.sampling_params import check_fields, check_stops, extra_args, output_limit
from quire.server.openai.service import GenerationService, releases_prefix
from quire.server.openai.work_size import num_chars, off_loop
from quire.server.tokens.bodies import TokensBody

_INTERNAL = frozenset(
    {
        "output_kind",
        "skip_clone",
        "detokenize",
        "flat_logprobs",
        "bad_words_token_ids",
        "timestamp_tokens",
        "aligning",
    }
)
"""Parameters that the server sets itself: clients neither receive nor send them."""


def public_params(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that a client receives and may send back."""
    fields: dict[str, Any] = msgspec.to_builtins(params)
    return {name: value for name, value in fields.items() if name not in _INTERNAL} | {
        "max_tokens": params.max_tokens
    }


@releases_prefix
async def create_tokens_of_tokens(api: GenerationService, body: TokensBody, request: Request) -> Response:
    """Generate tokens after token ids, whole or as a stream of events."""
    model = await api.names.find(body.model, request, pools=False)
    check_fields(body)
    if body.stream_options is not None and not body.stream:
        raise InvalidBody("Stream options can only be defined when `stream=True`.", param="stream_options")
    max_tokens = body.sampling_params.get("max_tokens")
    num_output = max_tokens if isinstance(max_tokens, int) else 1
    as_prompt = CompletionBody.model_construct(  # unchecked: the values are valid, and may be a million ids
        prompt=body.token_ids,
        max_tokens=num_output,
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
    )
    prompts = await api.reader.read_completion(as_prompt, model, max_sequences=api.settings.max_sequences)
    params = await off_loop(
        num_chars(body.sampling_params),
        lambda: _params(body, model, len(prompts[0].token_ids), max_n=api.settings.api.max_n),
    )
    call = new_call(api, "generate-tokens", body, request, model, prompts, [params])
    return await answer_call(api, call, TokensEncoder(api, body, call), request, stream=bool(body.stream))


def _params(body: TokensBody, model: RequestedModel, prompt_len: int, *, max_n: int) -> SamplingParams:
    known = set(SamplingParams.__struct_fields__) - _INTERNAL
    fields: dict[str, Any] = {
        name: body.sampling_params[name] for name in known & body.sampling_params.keys()
    }
    if fields.get("reasoning") is not None:
        fields["reasoning"] = _read_reasoning(fields["reasoning"])
    check_stops(fields.get("stop"))
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    fields["extra_args"] = extra_args(fields.get("extra_args"), body.kv_transfer_params)
    params = SamplingParams.from_optional(**{"max_tokens": None, **fields, "output_kind": kind})
    if params.n > max_n:
        raise RequestError(f"n must be at most {max_n} (--max-n), got {params.n}.", param="n")
    if body.stream and params.prompt_logprobs is not None:
        raise InvalidBody("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    params.max_tokens = output_limit(model, params.max_tokens, prompt_len)
    return params


def _read_reasoning(value: Any) -> ReasoningIds:
    try:
        return msgspec.convert(value, ReasoningIds)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params.reasoning: {error}", param="sampling_params") from None


class TokensEncoder(AnswerEncoder):
    """Encodes outputs as token ids."""

    def __init__(self, api: GenerationService, body: TokensBody, call: ApiCall) -> None:
        (params,) = call.params
        assert isinstance(params, SamplingParams)
        self._api, self._call, self._params = api, call, params
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._num_output = 0
        self._num_cached: int | None = None

    def encode(self, output: RequestOutput) -> bytes:
        self._num_cached = output.num_cached_tokens
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        choices = [self._choice(x) for x in output.outputs if x.token_ids or x.finish_reason]
        return event({"request_id": self._call.id, "choices": choices}) if choices else b""

    def finish(self) -> bytes:
        if not self._usage:
            return DONE
        usage = self._api.usage(self._call.num_prompt_tokens, self._num_output, self._num_cached)
        return event({"request_id": self._call.id, "choices": [], "usage": usage}) + DONE

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        num_output = sum(len(completion.token_ids) for completion in output.outputs)
        return {
            "request_id": self._call.id,
            "model": self._call.model.name,
            "created": self._call.created,
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": self._api.usage(self._call.num_prompt_tokens, num_output, output.num_cached_tokens),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "kv_transfer_params": output.kv_transfer_params,
        }

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        logprobs, num_top = None, self._params.logprobs
        if completion.logprobs is not None and num_top is not None:
            num_top = -1 if self._params.logprob_token_ids is not None else num_top
            token_formatter = self._call.model.token_formatter()
            logprobs = chat_logprobs(completion.token_ids, completion.logprobs, num_top, token_formatter)
        mask_ids = completion.sampling_mask
        mask = {} if mask_ids is None else {"sampling_mask": mask_ids.token_ids}
        return {
            "index": completion.index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
            **routed_experts(completion),
            **mask,
        }
