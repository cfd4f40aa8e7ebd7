"""Preparation of a chat request: checks, tools, prompt, output parser and sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from quire.data.params import BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import Prompt
from quire.server.openai.answer_pieces import AnswerFormat, OutputParser, Parsers
from quire.server.openai.prompts import num_chars, off_loop
from quire.server.openai.requests import MAX_STOP_STRINGS, ChatBody, Message
from quire.server.openai.sampling_params import (
    beam_params,
    check_chat,
    check_generate,
    constraint_of,
    params_size,
    sampling_params,
)
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.openai.tools import ToolUse, tool_use
from quire.text.tokenizer import Tokenizer

_NUM_DECODED_TOKENS = 64
"""Number of last prompt tokens that are decoded if the prompt has no text, to detect an open reasoning
block."""
_MAX_STOPS = {"msg": 64}
"""Maximum number of stop strings, by id prefix, of APIs that allow more than `MAX_STOP_STRINGS`."""
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Chat template variables that turn reasoning on and off."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request that is ready for the engine."""

    body: ChatBody
    call: ApiCall
    role: str
    """Role of the response message."""
    echoed: str
    """Beginning of the response: the last message, if `echo` is set and the roles match."""
    tools: ToolUse = field(default_factory=ToolUse)
    format: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def parses(self) -> bool:
        return self.format.make_parser is not None

    def parser(self) -> OutputParser:
        return OutputParser(
            self.format.make_parser and self.format.make_parser(),
            reasoning=self.format.reasoning,
            breaks=self.format.breaks,
            omit_reasoning=self.body.include_reasoning is False,
            single_call=not self.tools.parallel,
        )


async def prepare_chat(
    api: GenerationService, body: ChatBody, request: Request, id_prefix: str = "chatcmpl"
) -> ChatRequest:
    """Check a chat request and prepare its call; `id_prefix` is the prefix of its id."""
    settings = api.settings.api
    model = await api.names.find(body.model, request, pools=False)
    tokenizer = model.tokenizer
    check_generate(body, max_n=settings.max_n, max_stops=_MAX_STOPS.get(id_prefix, MAX_STOP_STRINGS))
    check_chat(body, trust_template=settings.trust_request_chat_template)
    size = num_chars([body.tools, body.response_format])
    tools, requested, constraint = await off_loop(size, partial(_read_tools, api, body, tokenizer))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    variables = api.reader.variables(body)
    wait = partial(api.until_disconnect, request)
    prompt = await api.reader.read_chat(body, model, max_tokens or 1, wait, variables=variables)
    format = AnswerFormat()
    if tokenizer is not None and (api.parsers.reasoning is not None or tools.calls != "none"):
        unconstrained = constraint is None or (tools.calls == "auto" and requested is None)
        format = _answer_format(
            api.parsers, body, tools, prompt, tokenizer, variables, unconstrained=unconstrained
        )
    limit = api.output_limit(max_tokens, len(prompt.token_ids))
    params = await off_loop(params_size(body), lambda: _build_params(api, body, limit, constraint, format))
    last = body.messages[-1]
    role = settings.response_role if body.add_generation_prompt else last.role
    echoed = _text(last) if body.echo and last.role == role else ""
    return ChatRequest(
        body, api.new_call(id_prefix, body, request, model, [prompt], [params]), role, echoed, tools, format
    )


def _read_tools(
    api: GenerationService, body: ChatBody, tokenizer: Tokenizer | None
) -> tuple[ToolUse, dict[str, Any] | None, dict[str, Any] | None]:
    """Return the tool use, the requested structured output constraint, and the constraint to apply, which
    also covers tool calls."""
    tools = tool_use(body, auto=api.parsers.auto)
    requested = constraint_of(body)
    constraint = tools.constrain(
        requested,
        is_format=body.response_format is not None,
        parser=api.parsers.tools,
        tokenizer=tokenizer,
    )
    return tools, requested, constraint


def _text(message: Message) -> str:
    return message.content if isinstance(message.content, str) else ""


def _answer_format(
    parsers: Parsers,
    body: ChatBody,
    tools: ToolUse,
    prompt: Prompt,
    tokenizer: Tokenizer,
    variables: Mapping[str, Any],
    *,
    unconstrained: bool,
) -> AnswerFormat:
    """Return how to parse the output. `variables`: the variables of the chat template. `unconstrained`:
    whether the output has no structured output constraint."""
    text = prompt.text
    if text is None:
        text = tokenizer.decode(prompt.token_ids[-_NUM_DECODED_TOKENS:], skip_special_tokens=False)
    switches = [variables[name] for name in _THINKING_VARIABLES if isinstance(variables.get(name), bool)]
    return parsers.answer_format(
        text,
        tokenizer,
        calls=tools.calls,
        name=tools.name,
        schemas=tools.schemas,
        num_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        enable_thinking=switches[0] if switches else None,
        unconstrained=unconstrained,
        continued_text=_text(body.messages[-1]) if body.continue_final_message else "",
    )


def _build_params(
    api: GenerationService,
    body: ChatBody,
    max_tokens: int,
    constraint: dict[str, Any] | None,
    format: AnswerFormat,
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
        logprobs=(body.top_logprobs or len(body.logprob_token_ids or ())) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=constraint,
        reasoning=format.reasoning,
        may_think=format.may_think,
        keeps_special_tokens=format.keeps_special_tokens,
    )
