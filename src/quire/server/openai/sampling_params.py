"""Conversion of request bodies to sampling parameters, with the API's checks. The constraint of structured
output has one of three equivalent forms."""

import json
from collections.abc import Callable
from typing import Any

from quire.config.unsupported import UNSUPPORTED, check_supported
from quire.data.kv_transfer import FIELD
from quire.data.params import BeamSearchParams, ReasoningIds, RequestOutputKind, SamplingParams
from quire.errors import RequestError, nearest
from quire.frontend.engine_facts import EngineFacts
from quire.logs import get_logger, printable, warn_once
from quire.server.http.errors import InvalidBody
from quire.server.openai.prompts import num_chars
from quire.server.openai.requests import (
    MAX_STOP_STRINGS,
    Body,
    ChatBody,
    ConversationBody,
    GenerateBody,
)

logger = get_logger(__name__)

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids",
    "bad_words", "logprob_token_ids", "stream_interval", "routed_experts_prompt_start",
)  # fmt: skip
"""Fields that a body and SamplingParams have in common."""
_LISTS = (
    *("logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids"),
    *("vllm_xargs", "extra_args"),
)
"""Fields of a body or of SamplingParams that may hold many values."""
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that take their defaults from the model's generation config."""
_FUNCTION_FIELDS = ("functions", "function_call")
"""Names of `tools` and `tool_choice` in older versions of the API."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Older names of fields, each with the key of `structured_outputs` that replaced it."""
_HANDLED = frozenset({*UNSUPPORTED["body field"], *_GUIDED, *_FUNCTION_FIELDS, "best_of", "prompt_embeds"})
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
"""The unknown fields of all requests of this process."""


def check_fields(body: Body) -> None:
    """Refuse unsupported fields, and log unknown ones."""
    for name in UNSUPPORTED["body field"].keys() & body.model_fields_set:
        check_supported("body field", name, getattr(body, name))
    if body.model_extra:
        unknown_fields.warn(body)


def check_generate(body: GenerateBody, *, max_n: int, max_stops: int = MAX_STOP_STRINGS) -> None:
    """Raise for fields that exclude each other or exceed the limits of the API."""
    check_fields(body)
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


def check_stops(stop: object, limit: int = MAX_STOP_STRINGS) -> None:
    """Limit the number of stop strings, each of which is checked at every token."""
    if isinstance(stop, list) and len(stop) > limit:
        raise RequestError(f"stop may be at most {limit} strings, got {len(stop)}.", param="stop")


def check_chat(body: ChatBody, *, trust_template: bool) -> None:
    if (body.model_extra or {}).get("prompt_embeds") is not None:
        raise RequestError("prompt_embeds is supported by /v1/completions only", param="prompt_embeds")
    if any((body.model_extra or {}).get(name) not in (None, "none") for name in _FUNCTION_FIELDS):
        warn_once(logger, "`functions` and `function_call` have no effect: send `tools` and `tool_choice`")
    if body.top_logprobs and not body.logprobs:
        raise InvalidBody("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < -1:
        raise InvalidBody("`top_logprobs` must be a positive value or -1.", param="top_logprobs")
    check_contents(body)
    check_template(body.chat_template, trust_template)


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


def constraint_of(body: GenerateBody) -> dict[str, Any] | None:
    """Return the structured output constraint of a request in the format of SamplingParams, or None. Raise
    RequestError if the request has several."""
    extra = body.model_extra or {}
    guided = {key: extra[name] for name, key in _GUIDED.items() if extra.get(name) not in (None, False)}
    forms = {
        "response_format": _from_format(body.response_format),
        "structured_outputs": body.structured_outputs,
        "guided_*": guided if guided.keys() - {"whitespace_pattern"} else None,
    }
    constraints = {name: constraint for name, constraint in forms.items() if constraint is not None}
    if len(constraints) > 1:
        raise RequestError(
            f"{' and '.join(constraints)} both constrain the output; send one of them",
            param=next(iter(constraints)),
        )
    return next(iter(constraints.values()), None)


def _from_format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    if format is None:
        return None
    kind = format.get("type", "text")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise RequestError(
            f"`response_format` has no type {kind!r:.80}; known: {known}", param="response_format"
        )
    return _FORMATS[kind](format)


def _from_schema(format: dict[str, Any]) -> dict[str, Any]:
    inner = format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise InvalidBody(
            "`response_format` of type json_schema needs `json_schema.schema`, an object",
            param="response_format",
        )
    return {"json": schema}


_FORMATS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "text": lambda format: None,
    "json_object": lambda format: {"json_object": True},
    "json_schema": _from_schema,
    "structural_tag": lambda format: {"structural_tag": json.dumps(format)},
}


def params_size(source: GenerateBody | SamplingParams) -> int:
    """Return the approximate number of characters in the lists and texts of sampling parameters."""
    return num_chars([getattr(source, name, None) for name in _LISTS])


def sampling_params(
    body: GenerateBody,
    facts: EngineFacts,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: dict[str, Any] | None,
    reasoning: ReasoningIds | None = None,
    may_think: bool = True,
    keeps_special_tokens: bool = False,
) -> SamplingParams:
    """Return the sampling parameters of a body. `constraint`: the structured output constraint. `reasoning`:
    the token ids of the reasoning marks; None if reasoning is not parsed. `may_think`: whether reasoning may
    precede constrained output."""
    fields = {name: getattr(body, name) for name in _SAMPLING}
    if keeps_special_tokens:
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
    if constraint is not None and not may_think:
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
