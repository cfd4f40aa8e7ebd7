"""Preparation of a chat request: checks, prompt, sampling parameters and output parser."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from quire.data.params import BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import Prompt
from quire.server.openai.answer_pieces import OutputParser
from quire.server.openai.parsing import AnswerFormat
from quire.server.openai.requests import MAX_STOP_STRINGS, ChatBody, Message
from quire.server.openai.sampling_params import (
    beam_params,
    chat_num_logprobs,
    check_chat,
    check_generate,
    sampling_params,
)
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.openai.structured import constraint_of
from quire.server.openai.tools import ToolUse, tool_use

_TAIL_TOKENS = 64
"""Last tokens of a prompt without text that are decoded, to detect an opened reasoning block."""
_MAX_STOPS = {"msg": 64}
"""Maximum stop strings of the APIs that allow more than usual, by id prefix."""
_SWITCHES = ("enable_thinking", "thinking")
"""Chat template variables that turn reasoning on and off."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request that is ready for the engine."""

    body: ChatBody
    job: ApiCall
    role: str
    """Role of the response message."""
    echoed: str
    """Beginning of the response: the last message, if `echo` is set and the roles match."""
    use: ToolUse = field(default_factory=ToolUse)
    reading: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def parses(self) -> bool:
        return self.reading.make is not None

    def listener(self) -> OutputParser:
        """Return the output parser of one choice."""
        return OutputParser(
            self.reading.make and self.reading.make(),
            reasoning=self.reading.reasoning,
            breaks=self.reading.breaks,
            leaves_out_reasoning=self.body.include_reasoning is False,
            one_call=not self.use.several,
        )


async def prepare_chat(
    api: GenerationService, body: ChatBody, request: Request, kind: str = "chatcmpl"
) -> ChatJob:
    """Check a chat request and prepare its call; `kind` is the prefix of its id."""
    settings = api.settings.api
    await api.check_model(body.model, pools=False)
    check_generate(body, max_n=settings.max_n, max_stops=_MAX_STOPS.get(kind, MAX_STOP_STRINGS))
    check_chat(body, trust_template=settings.trust_request_chat_template)
    use = tool_use(body, auto=api.parsers.auto)
    constraint = _build_constraint(api, body, use)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = await api.reader.of_chat(body, max_tokens, partial(api.answering.until_gone, request.receive))
    free = constraint is None or (use.calls == "auto" and constraint_of(body) is None)
    reading = _choose_reading(api, body, use, prompt, free=free)
    limit = api.output_limit(max_tokens, len(prompt.token_ids))
    params = _build_params(api, body, limit, constraint, reading)
    last = body.messages[-1]
    role = settings.response_role if body.add_generation_prompt else last.role
    echoed = _text(last) if body.echo and last.role == role else ""
    return ChatJob(body, api.job(kind, body, request, [prompt], [params]), role, echoed, use, reading)


def _text(message: Message) -> str:
    return message.content if isinstance(message.content, str) else ""


def _build_constraint(api: GenerationService, body: ChatBody, use: ToolUse) -> dict[str, Any] | None:
    """Return the structured output constraint: the request's own, that of forced tool calls, or a grammar
    that allows both."""
    constraint = constraint_of(body)
    if use.forced and constraint is not None and body.response_format is None:
        raise RequestError(
            "You can only either use constraints for structured outputs or tools, not both.",
            param="structured_outputs",
        )
    schema = _schema_only(constraint)
    tokenizer = api.inputs_of(body.model).tokenizer
    if tokenizer is not None and (constraint is None or schema is not None):
        return use.constraint() or use.chosen_constraint(api.parsers.tools, tokenizer, schema) or constraint
    return use.constraint() or constraint


def _schema_only(constraint: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema of a constraint that consists of nothing else."""
    match constraint:
        case {"json": dict(schema), **more} if not more:
            return schema
        case {"json_object": True, **more} if not more:
            return {"type": "object"}
    return None


def _choose_reading(
    api: GenerationService, body: ChatBody, use: ToolUse, prompt: Prompt, *, free: bool
) -> AnswerFormat:
    """Return how to parse the output. `free`: whether the output is unconstrained."""
    tokenizer = api.inputs_of(body.model).tokenizer
    if tokenizer is None or (api.parsers.reasoning is None and use.calls == "none"):
        return AnswerFormat()
    text = prompt.text
    if text is None:
        text = tokenizer.decode(prompt.token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return api.parsers.reading(
        text,
        tokenizer,
        calls=use.calls,
        name=use.name,
        schemas=use.schemas,
        num_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        thinks=_thinks(api, body),
        free=free,
        begun=_text(body.messages[-1]) if body.continue_final_message else "",
    )


def _thinks(api: GenerationService, body: ChatBody) -> bool | None:
    """Return whether the request turns reasoning on or off, or None."""
    variables = api.reader.variables(body, body.reasoning_effort)
    switches = [variables[name] for name in _SWITCHES if isinstance(variables.get(name), bool)]
    return switches[0] if switches else None


def _build_params(
    api: GenerationService,
    body: ChatBody,
    max_tokens: int,
    constraint: dict[str, Any] | None,
    reading: AnswerFormat,
) -> SamplingParams | BeamSearchParams:
    facts = api.engine.facts
    if body.use_beam_search:
        return beam_params(body, facts, max_tokens=max_tokens, constraint=constraint)
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
        constraint=constraint,
        reasoning=reading.reasoning,
        may_think=reading.may_think,
        keeps_special_tokens=reading.keeps_special_tokens,
    )
