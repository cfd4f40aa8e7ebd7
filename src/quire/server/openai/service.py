"""Shared code of the generating routes: ids, calls of the engine and their responses."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.config.server_sections import ApiSection
from quire.data.cache_hints import CacheHints
from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.outputs import PromptLogprobs, RequestOutput, RequestStateStats, SampleLogprobs
from quire.data.params import INT64_MAX, INT64_MIN, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.data.pooling import PoolingParams
from quire.errors import RequestError
from quire.frontend.checked_params import CheckedParams
from quire.frontend.engine import AsyncEngine
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import Outputs
from quire.logs import get_logger
from quire.metrics.api_keys import KeyAccount
from quire.server.http.errors import json_response
from quire.server.http.in_flight import LONG_BYTES, MAX_LONG_BODIES, RunningRequests, num_body_bytes
from quire.server.http.limits import account_of
from quire.server.http.sse import AnswerEncoder, EventStream
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.service import LoRAService, open_lora_service
from quire.server.openai.cache_hints import cache_hints
from quire.server.openai.prompts import PromptReader, off_loop
from quire.server.openai.requested_model import RequestedModel, ServedNames
from quire.server.openai.requests import CallBody
from quire.server.openai.sampling_params import params_size
from quire.server.openai.streams import (
    LoggedOutputs,
    MergedOutputs,
    OrderedOutputs,
    Pauses,
    beam_search,
    collect_final_outputs,
    final_output,
    gather_all,
)
from quire.server.openai.timeline import TIMELINE_HEADER, CallTimeline, request_metrics
from quire.server.settings import ServerSettings, parsers_of

logger = get_logger(__name__)

T = TypeVar("T")
Params = SamplingParams | BeamSearchParams | PoolingParams
Answer = Callable[["GenerationService", Any, Request], Coroutine[Any, Any, Response]]
"""Handler of a route: (service, body, request) -> response."""
_MAX_ID = 256
"""Maximum characters of a client's request id, of which every sequence of the request has a copy."""
_COMPILE_S = 5.0
"""Maximum seconds to compile the grammar of a call."""
_CHOICE_SIZE, _LOGPROB_SIZE = 32, 4
"""Cost of encoding a choice, and of one logprob, in the unit of `answer_size`."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One API call: the input of the engine, and the fields that every part of the response has."""

    id: str
    created: int
    model: RequestedModel
    priority: int
    rank: int | None
    """Data-parallel rank of the engine core that must run the call; None: any engine core."""
    prompts: list[Prompt]
    params: list[Params]
    timeline: CallTimeline | None = None
    """Timings of the call; None if the client did not request them."""
    account: KeyAccount | None = None
    """Account of the call's API key; None without a named key."""
    target: LatencyTarget = NO_TARGET

    @property
    def hints(self) -> CacheHints | None:
        return self.prompts[0].hints

    @property
    def routing(self) -> dict[str, Any]:
        """Return the keyword arguments of the engine that all requests of the call share."""
        return {
            "priority": self.priority,
            "rank": self.rank,
            "account": self.account,
            "lora": self.model.lora,
            "target": self.target,
        }

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def frame(self, object: str) -> dict[str, Any]:
        """Return the first fields of a response, or of a chunk of it. `object`: its type, such as
        `chat.completion`."""
        return {"id": self.id, "object": object, "created": self.created, "model": self.model.name}

    def engine_ids(self) -> list[str]:
        if len(self.prompts) == 1:
            return [self.id]
        return [f"{self.id}-{index}" for index in range(len(self.prompts))]


class GenerationService:
    """Engine, settings and helpers that the routes share."""

    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, registry: LoRARegistry | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.adapters: LoRAService = open_lora_service(engine, settings, registry)
        self.names = ServedNames(engine, self.adapters, tokens_as_ids=settings.api.return_tokens_as_token_ids)
        self.reader = PromptReader(engine.facts.chat_template, settings.api)
        self.parsers = parsers_of(settings.api)
        if (tokenizer := engine.inputs.tokenizer) is not None and engine.inputs.pooling is None:
            self.parsers.detect(tokenizer.chat_template, engine.facts.chat_template)
        self.running_requests = RunningRequests()
        self.long_bodies = asyncio.Semaphore(MAX_LONG_BODIES)
        self._lock = asyncio.Lock()
        """Lock for the pauses of large calls: one of these calls at a time resumes on the event loop."""
        facts = engine.facts
        self.fingerprint = _fingerprint(settings.api, facts)

    def check_count(self, count: int, what: str, *, param: str) -> None:
        if count > (limit := self.settings.max_sequences):
            raise RequestError(
                f"{count} {what} exceed the maximum of {limit} per request (VLLM_MAX_N_SEQUENCES); send "
                "fewer at once",
                param=param,
            )

    def new_call(
        self,
        id_prefix: str,
        body: CallBody,
        request: Request,
        model: RequestedModel,
        prompts: list[Prompt],
        params: Sequence[Params],
    ) -> ApiCall:
        """Return the engine call of an HTTP request. Charge the prompt tokens to the request's API key, and
        log the prompts if this is enabled."""
        base = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
        _check_id(base)
        priority = _header_int(request, "x-vllm-priority")
        rank = _header_int(request, "x-data-parallel-rank")
        hints = cache_hints(body, request.headers)
        for prompt in prompts:
            prompt.hints = hints
        account = account_of(request.scope)
        target = (account and account.target) or self.engine.inputs.target
        call = ApiCall(
            id=f"{id_prefix}-{base}",
            created=int(time.time()),
            model=model,
            priority=body.priority if priority is None else priority,
            rank=rank,
            prompts=prompts,
            params=list(params),
            timeline=CallTimeline.of(request, self.engine.inputs.tokenizer),
            account=account,
            target=target.relaxed(body.slo_ttft_ms, body.slo_itl_ms),
        )
        if call.account is not None:
            call.account.add_prompt(call.num_prompt_tokens)
        if self.settings.log.enable_log_requests:
            for prompt in prompts:
                shown = self._shorten(prompt.text)
                logger.info("Received request %s: params: %s, prompt: %r", call.id, params[0], shown)
        return call

    async def answer(
        self,
        call: ApiCall,
        encoder: AnswerEncoder,
        request: Request,
        *,
        stream: bool,
        respond: Callable[[Any], Response] = json_response,
        in_order: bool = False,
        before_encoding: Callable[[list[RequestOutput]], Coroutine[Any, Any, None]] | None = None,
    ) -> Response:
        """Run the call and return its response from the encoder. `in_order`: a stream has all outputs of a
        prompt before those of the next prompt. `before_encoding` is called with the final outputs of a
        response that is not streamed, and awaited before they are encoded."""
        timeline = call.timeline
        if stream:
            outputs = await self.streamed(call, in_order=in_order)
            on_output = None if timeline is None else timeline.add_output
            return EventStream(
                outputs, encoder=encoder, running_requests=self.running_requests, on_output=on_output
            )
        until_disconnect = partial(self.running_requests.until_disconnect, request.receive)
        finals = await until_disconnect(self.final_outputs(call))
        if before_encoding is not None:
            await until_disconnect(before_encoding(finals))
        if timeline is None:
            return await off_loop(answer_size(finals), lambda: respond(encoder.response_body(finals)))
        for output in finals:
            timeline.add_output(output)
        response = respond(timeline.add_to(encoder.response_body(finals)))
        if timeline.header:
            response.headers[TIMELINE_HEADER] = timeline.header
        return response

    def pauses(self) -> Pauses:
        return Pauses(lock=self._lock)

    async def streamed(self, call: ApiCall, *, in_order: bool = False) -> Outputs:
        """Start the requests and return their outputs as they arrive. With several prompts, the ids are
        `call.engine_ids()`. With `in_order`, all outputs of a prompt precede those of the next prompt."""
        streams: list[Outputs] = []
        pause = self.pauses()
        checker = ParamsChecker(call.model)
        try:
            for prompt, params, id in zip(call.prompts, call.params, call.engine_ids(), strict=True):
                assert isinstance(params, SamplingParams)
                checked, timed = await checker.of(params), call.timeline is not None
                streams.append(self.engine.generate(prompt, checked, id, timed=timed, **call.routing))
                await pause.if_due()
        except BaseException:
            for item in streams:
                await item.aclose()
            raise
        outputs: Outputs = streams[0]
        if in_order:
            outputs = OrderedOutputs(streams)
        elif len(streams) > 1:
            outputs = MergedOutputs(dict(zip(call.engine_ids(), streams, strict=True)), pause)
        if self.settings.log.enable_log_outputs:
            outputs = LoggedOutputs(outputs, call.id, self._shorten)
        return outputs

    async def final_outputs(self, call: ApiCall) -> list[RequestOutput]:
        """Run the call and return the final outputs, in the order of the prompts."""
        if isinstance(call.params[0], BeamSearchParams):
            pauses = self.pauses()
            coroutines = [
                beam_search(
                    self.engine, prompt, params, id, pauses=pauses, model=call.model, routing=call.routing
                )
                for prompt, params, id in zip(call.prompts, call.params, call.engine_ids(), strict=True)
                if isinstance(params, BeamSearchParams)
            ]
            return await gather_all(coroutines)
        outputs = await self.streamed(call)
        if len(call.prompts) == 1:
            return [await final_output(outputs)]
        last = await collect_final_outputs(outputs)
        return [last[id] for id in call.engine_ids()]

    def reports_cache(self, hints: CacheHints | None) -> bool:
        """Whether the usage in a response reports the cached tokens, for a request with these cache hints."""
        return self.settings.api.enable_prompt_tokens_details or hints is not None

    def usage(
        self,
        num_prompt: int,
        num_output: int,
        num_cached: int | None = None,
        timeline: CallTimeline | None = None,
        *,
        stats: RequestStateStats | None = None,
        num_created: int | None = None,
        hints: CacheHints | None = None,
    ) -> dict[str, Any]:
        """Return the usage in OpenAI's format. `num_created` counts the prompt tokens that were added to the
        prefix cache. Cached tokens are reported with --enable-prompt-tokens-details, or if the request has
        cache hints."""
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_output,
            "completion_tokens": num_output,
        }
        if num_cached is not None and self.reports_cache(hints):
            details: dict[str, Any] = {"cached_tokens": num_cached}
            usage["prompt_tokens_details"] = details
            if stats is not None and (stats.num_from_host or stats.num_from_disk or stats.num_from_remote):
                by_tier = details["cached_tokens_by_tier"] = {
                    "host": stats.num_from_host,
                    "disk": stats.num_from_disk,
                }
                if stats.num_from_remote:
                    by_tier["remote"] = stats.num_from_remote
            if num_created is not None:
                details["created_cache_tokens"] = num_created
        if timeline is not None and timeline.timings is not None:
            usage["timeline"] = timeline.timings
        return usage

    def metrics(self, stats: RequestStateStats | None, num_sequences: int) -> dict[str, Any] | None:
        """Return the timings of a request with a single choice; None if they are disabled or unknown, or for
        several choices."""
        if not self.settings.api.enable_per_request_metrics or stats is None or num_sequences != 1:
            return None
        return request_metrics(stats)

    def _shorten(self, text: str | None) -> str:
        return (text or "")[: self.settings.log.max_log_len]


class ParamsChecker:
    """Checker of the sampling parameters of one call. Shared parameters and equal grammars are checked once;
    long parameters and grammars are checked in a thread."""

    def __init__(self, model: RequestedModel) -> None:
        self._model = model
        self._checked: dict[int, CheckedParams] = {}
        """Results by the id of the params."""
        self._grammar: StructuredOutputsParams | None = None

    async def of(self, params: SamplingParams) -> CheckedParams:
        """Check sampling parameters. Prompts that share one params object share the result."""
        if id(params) not in self._checked:
            check = partial(self._check, params)
            is_long = params.structured_outputs is not None
            self._checked[id(params)] = await (
                asyncio.to_thread(check) if is_long else off_loop(params_size(params), check)
            )
        return self._checked[id(params)]

    def _check(self, params: SamplingParams) -> CheckedParams:
        grammar = params.structured_outputs
        if grammar is not None and grammar != self._grammar:
            self._model.inputs.check_grammar(grammar, _COMPILE_S)
            self._grammar = grammar
        return self._model.inputs.check(params, lora=self._model.lora, grammar=self._grammar)


def answer_size(outputs: Sequence[RequestOutput]) -> int:
    """Return the cost of encoding an answer, as the number of characters whose tokenization takes as
    long."""
    size = sum(_positions_size(output.prompt_logprobs) for output in outputs)
    for output in outputs:
        for choice in output.outputs:
            size += _CHOICE_SIZE + len(choice.text) + _positions_size(choice.logprobs)
    return size


def _positions_size(positions: PromptLogprobs | SampleLogprobs | None) -> int:
    return 0 if not positions else _LOGPROB_SIZE * len(positions) * len(positions[-1] or ())


def limit_long_bodies(answer: Answer) -> Answer:
    """Let a handler wait while `MAX_LONG_BODIES` requests with long bodies are processed (decorator)."""

    @wraps(answer)
    async def limited(api: GenerationService, body: Any, request: Request) -> Response:
        if num_body_bytes(request) < LONG_BYTES:
            return await answer(api, body, request)
        async with api.long_bodies:
            return await answer(api, body, request)

    return limited


def _fingerprint(api: ApiSection, facts: EngineFacts) -> str | None:
    served = repr((facts.model_names, facts.root, facts.vocab))
    digest = hashlib.sha256(served.encode()).hexdigest()[:8]
    match api.fingerprint_mode:
        case "full":
            return f"quire-{facts.version}-{digest}"
        case "hash":
            return digest
        case "custom":
            return api.fingerprint_value
    return None


def _check_id(id: str) -> None:
    """Raise RequestError for an id that is too long or not printable in a log line."""
    if len(id) > _MAX_ID:
        raise RequestError(
            f"the request id has {len(id)} characters, and may have {_MAX_ID}; send a shorter one",
            param="request_id",
        )
    if not id.isprintable():
        raise RequestError(
            f"the request id {id!r:.80} has characters that cannot be printed; send one without them",
            param="request_id",
        )


def _header_int(request: Request, name: str) -> int | None:
    text = request.headers.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    value = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None
    if value is None or not INT64_MIN <= value <= INT64_MAX:
        raise RequestError(f"the header {name} must be an integer of 64 bits, got {text!r:.80}")
    return value
