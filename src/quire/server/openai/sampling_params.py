"""Conversion of request bodies to sampling parameters, with the API's checks."""

from collections.abc import Sequence
from typing import Any

from quire.config.server_sections import ApiSection
from quire.config.unsupported import UNSUPPORTED, check_supported
from quire.data.kv_transfer import FIELD
from quire.data.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.errors import RequestError, nearest
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.inputs import Prompt
from quire.logs import get_logger, printable, warn_once
from quire.server.http.errors import InvalidBody
from quire.server.openai.answer_pieces import AnswerFormat
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.requests import (
    MAX_STOP_STRINGS,
    Body,
    ChatBody,
    CompletionBody,
    ConversationBody,
    GenerateBody,
)
from quire.server.openai.tools import GUIDED

logger = get_logger(__name__)

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids",
    "bad_words", "logprob_token_ids", "stream_interval", "routed_experts_prompt_start",
)  # fmt: skip
"""Fields that a body and SamplingParams have in common."""
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that take their defaults from the model's generation config."""
_DEFAULT_MAX_TOKENS = 16
"""Maximum output tokens of a completion that does not set them."""
_ONLY_TEXT = AnswerFormat()
_FUNCTION_FIELDS = ("functions", "function_call")
"""Names of `tools` and `tool_choice` in older versions of the API."""
_HANDLED = frozenset({*UNSUPPORTED["body field"], *GUIDED, *_FUNCTION_FIELDS, "best_of", "prompt_embeds"})
"""Fields that the body models do not declare, but that have an effect, an error or a warning of their own."""


class UnknownFields:
    """Logs the unknown fields of requests, each name once. A client can neither fill the log nor the memory:
    names are truncated, and only the first ones are logged."""

    def __init__(self, max_names: int = 100, max_chars: int = 64) -> None:
        self._max_names, self._max_chars = max_names, max_chars
        self._logged: set[str] = set()

    def warn(self, body: Body) -> None:
        for name in body.model_extra or ():
            if len(self._logged) >= self._max_names:
                return
            shown = printable(name, self._max_chars)
            if shown not in self._logged and name not in _HANDLED:
                self._logged.add(shown)
                suggestion = nearest(shown, type(body).model_fields)
                logger.warning(
                    "The following fields were present in the request but ignored: '%s'%s", shown, suggestion
                )


unknown_fields = UnknownFields()
"""The logger of unknown fields that all requests of this process share."""


def check_fields(body: Body) -> None:
    """Raise RequestError for unsupported fields, and log unknown fields, which have no effect."""
    for name in UNSUPPORTED["body field"].keys() & body.model_fields_set:
        check_supported("body field", name, getattr(body, name))
    if body.model_extra:
        unknown_fields.warn(body)


def check_generate(body: GenerateBody, *, max_n: int, max_stops: int = MAX_STOP_STRINGS) -> None:
    """Raise RequestError for fields that exclude each other or exceed the API's limits: `max_n` choices per
    prompt and `max_stops` stop strings."""
    if body.stream_options is not None and not body.stream:
        raise InvalidBody("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.stream and body.prompt_logprobs:
        raise InvalidBody("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    if body.stream and body.use_beam_search:
        raise RequestError("Streaming is not currently supported with beam search", param="stream")
    if (body.n or 1) > max_n:
        raise RequestError(f"n must be at most {max_n} (--max-n), got {body.n}.", param="n")
    best_of = (body.model_extra or {}).get("best_of")
    if best_of not in (None, 1, body.n or 1):
        warn_once(
            logger, "`best_of` is no longer supported and has no effect: exactly n choices are generated"
        )
    check_stops(body.stop, max_stops)
    check_fields(body)


def check_stops(stop: object, limit: int = MAX_STOP_STRINGS) -> None:
    """Raise RequestError for more than `limit` stop strings, as each is checked at every token."""
    if isinstance(stop, list) and len(stop) > limit:
        raise RequestError(f"stop may be at most {limit} strings, got {len(stop)}.", param="stop")


def check_chat(body: ChatBody, settings: ApiSection, *, max_stops: int = MAX_STOP_STRINGS) -> None:
    """Raise for fields of a chat that exclude each other or exceed the limits of the API."""
    if (body.model_extra or {}).get("prompt_embeds") is not None:
        raise RequestError("prompt_embeds is supported by /v1/completions only", param="prompt_embeds")
    if any((body.model_extra or {}).get(name) not in (None, "none") for name in _FUNCTION_FIELDS):
        warn_once(logger, "`functions` and `function_call` have no effect: send `tools` and `tool_choice`")
    if body.top_logprobs and not body.logprobs:
        raise InvalidBody("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < -1:
        raise InvalidBody("`top_logprobs` must be a positive value or -1.", param="top_logprobs")
    check_contents(body)
    check_template(body.chat_template, settings.trust_request_chat_template)
    check_generate(body, max_n=settings.max_n, max_stops=max_stops)


def check_contents(body: ConversationBody) -> None:
    for index, message in enumerate(body.messages):
        if message.role != "assistant" and message.content is None and "content" in message.model_fields_set:
            raise RequestError(
                f"messages[{index}].content is null, which only an assistant's may be: send text or parts",
                param="messages",
            )


def check_template(chat_template: str | None, trusted: bool) -> None:
    if chat_template is not None and not trusted:
        raise RequestError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. Refused "
            "chat template with untrusted source.",
            param="chat_template",
        )


def output_limit(model: RequestedModel, max_tokens: int | None, prompt_len: int) -> int:
    """Return the maximum output tokens: the least of `max_tokens`, the room left in max_model_len, and the
    model's default. Raise RequestError if `max_tokens` exceeds the room left."""
    limit = model.inputs.max_model_len
    if max_tokens is not None and max_tokens > limit:
        raise RequestError(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer "
            "output tokens.",
            param="max_tokens",
        )
    if max_tokens is not None and max_tokens + prompt_len > limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} "
            f"output tokens and your prompt contains {prompt_len} input tokens, for a total of "
            f"{max_tokens + prompt_len} tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens.",
            param="input_tokens",
        )
    bounds = (limit - prompt_len, max_tokens, model.facts.default_sampling.get("max_tokens"))
    return min(bound for bound in bounds if bound is not None)


def chat_params(
    body: ChatBody,
    model: RequestedModel,
    prompt: Prompt,
    constraint: dict[str, Any] | None,
    format: AnswerFormat,
) -> SamplingParams | BeamSearchParams:
    """Return the parameters of a chat. `format`: how its output is parsed."""
    max_tokens = output_limit(model, body.num_requested, len(prompt.token_ids))
    if body.use_beam_search:
        return beam_params(body, model.facts, max_tokens=max_tokens, constraint=constraint)
    if body.logprob_token_ids is not None and not body.logprobs:
        raise RequestError(
            "when using `logprob_token_ids`, `logprobs` must be set to true.", param="logprob_token_ids"
        )
    return sampling_params(
        body,
        model.facts,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or len(body.logprob_token_ids or ())) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=constraint,
        format=format,
    )


def completion_params(
    body: CompletionBody,
    model: RequestedModel,
    prompts: Sequence[Prompt],
    constraint: dict[str, Any] | None,
) -> list[SamplingParams | BeamSearchParams]:
    """Return the parameters of each prompt of a completion. Prompts with equal `max_tokens` share them.
    `constraint`: the structured output constraint."""
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    max_tokens = 1 if body.returns_prompt_only else max_tokens
    limits = [output_limit(model, max_tokens, len(prompt.token_ids)) for prompt in prompts]
    echoes_logprobs = body.prompt_logprobs is None and body.echo

    def params(limit: int) -> SamplingParams | BeamSearchParams:
        if body.use_beam_search:
            return beam_params(body, model.facts, max_tokens=limit, constraint=constraint)
        return sampling_params(
            body,
            model.facts,
            max_tokens=limit,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echoes_logprobs else body.prompt_logprobs,
            constraint=constraint,
        )

    shared = {limit: params(limit) for limit in dict.fromkeys(limits)}
    return [shared[limit] for limit in limits]


def sampling_params(
    body: GenerateBody,
    facts: EngineFacts,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: dict[str, Any] | None,
    format: AnswerFormat = _ONLY_TEXT,
) -> SamplingParams:
    """Return the sampling parameters of a body. `constraint`: the structured output constraint. `format`: how
    the output is parsed."""
    reasoning = format.reasoning
    fields = {name: getattr(body, name) for name in _SAMPLING}
    if format.keeps_special_tokens:
        fields["skip_special_tokens"] = False
    budget = None if body.thinking_token_budget == -1 else body.thinking_token_budget
    if budget is not None and reasoning is None:
        raise RequestError(
            "`thinking_token_budget` needs a chat, and a server with a --reasoning-parser of known marks",
            param="thinking_token_budget",
        )
    defaults = facts.default_sampling
    if (body.n or 1) > 1 and defaults.get("temperature") == 0:
        defaults = defaults | {"temperature": None}  # several choices ignore a greedy default
    for name in _DEFAULTED:
        if fields[name] is None:
            fields[name] = defaults.get(name)
    detection = body.repetition_detection
    if constraint is not None and not format.may_think:
        reasoning = budget = None
    return SamplingParams.from_optional(
        **fields,
        extra_args=extra_args(body.vllm_xargs, body.kv_transfer_params),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        repetition_detection=detection and detection.model_dump(),
        structured_outputs=constraint,
        thinking_token_budget=budget,
        reasoning=reasoning if budget is not None or constraint is not None else None,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def extra_args(args: dict[str, Any] | None, transfer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the `extra_args` of sampling parameters, with the KV transfer parameters if there are any."""
    return args if transfer is None else {**(args or {}), FIELD: transfer}


def beam_params(
    body: GenerateBody, facts: EngineFacts, *, max_tokens: int, constraint: dict[str, Any] | None
) -> BeamSearchParams:
    width = body.n or 1
    check_supported("call argument", "structured_outputs", constraint)
    if 2 * width > facts.max_logprobs:
        raise RequestError(
            f"a beam search of n={width} needs {2 * width} logprobs per token, above max_logprobs="
            f"{facts.max_logprobs}; lower n or raise --max-logprobs",
            param="n",
        )
    temperature = facts.default_sampling.get("temperature") if body.temperature is None else body.temperature
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=1.0 if temperature is None else temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )
