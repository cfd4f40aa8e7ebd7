"""What the generating routes share: ids, model names, a job and its answer."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.data.lora import LoRARequest
from quire.data.outputs import RequestOutput, RequestStateStats
from quire.data.params import INT64_MAX, INT64_MIN, BeamSearchParams, SamplingParams
from quire.data.pooling import PoolingParams
from quire.errors import RequestError
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.pooling import GENERATES_NOT, NOT_POOLING
from quire.logs import get_logger, printable
from quire.metrics.keys import KeyAccount
from quire.server.encoder import AnswerEncoder
from quire.server.engine import Engine, EngineFactsLike, Outputs
from quire.server.http.errors import NotFound, json_response
from quire.server.http.in_flight import Answering
from quire.server.http.limits import account_of
from quire.server.http.sse import EventStream
from quire.server.long_work import LongWork
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.service import LoRAService, adapters_of
from quire.server.openai.beam import all_of, beam_search, final
from quire.server.openai.checked_params import ParamsChecker
from quire.server.openai.logprobs import Speller
from quire.server.openai.prompts import PromptReader
from quire.server.openai.requests import CallBody, GenerateBody
from quire.server.openai.sampling_params import output_limit
from quire.server.openai.streams import InOrder, Logged, Merged, Pauses, last_of_each
from quire.server.openai.timeline import HEADER, JobTimeline, Timed, request_metrics
from quire.server.settings import ApiSection, ServerSettings, parsers_of

logger = get_logger(__name__)

Params = SamplingParams | BeamSearchParams | PoolingParams
_MAX_ID = 256
"""Characters of an id that a client chooses: each of its sequences carries a copy."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One call of the API: what goes to the engine, and what every part of the answer carries."""

    id: str
    created: int
    model: str
    priority: int
    rank: int | None
    """The only core that it may go to."""
    prompts: list[Prompt]
    params: list[Params]
    timeline: JobTimeline | None = None
    """Where its time goes, if it wants to know."""
    account: KeyAccount | None = None
    """Of the key that it came with."""
    lora: LoRARequest | None = None
    """The adapter that answers it."""

    def engine_ids(self) -> list[str]:
        if len(self.prompts) == 1:
            return [self.id]
        return [f"{self.id}-{place}" for place in range(len(self.prompts))]


class GenerationService:
    """The engine and the settings, as the routes need them."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, registry: LoRARegistry | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.adapters: LoRAService = adapters_of(engine, settings, registry)
        self.reader = PromptReader(engine, settings.api, self.adapters.request_of)
        self.parsers = parsers_of(settings.api)
        self.answering = Answering()
        self.long_work = LongWork()
        facts = engine.facts
        self.fingerprint = _fingerprint(settings.api, facts)

    async def check_model(self, name: str | None, *, pools: bool | None = None) -> None:
        """That it is the name of this model, or of an adapter, which is looked for if need be. Where that is
        told: of a model that pools, or that does not."""
        if name and name not in self.engine.facts.model_names:
            await self.adapters.settle(name)
            if self.adapters.get(name) is None:
                raise no_model(name)
            await asyncio.to_thread(self.inputs_of, name)  # files that may not have been read yet
        if pools is not None and pools != (self.engine.inputs.pooling is not None):
            raise NotFound(NOT_POOLING.format(what="this route") if pools else GENERATES_NOT)

    def inputs_of(self, name: str | None) -> InputProcessor:
        """How requests to the model, or to the adapter of this name, are read."""
        return self.engine.inputs.of(self.adapters.request_of(name))

    def job(
        self,
        kind: str,
        body: CallBody,
        request: Request,
        prompts: list[Prompt],
        params: Sequence[Params],
    ) -> ApiCall:
        base = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
        _check_id(base)
        urgent = _header_int(request, "x-vllm-priority")
        name, lora = self._model(body.model, request)
        job = ApiCall(
            id=f"{kind}-{base}",
            created=int(time.time()),
            model=name,
            priority=body.priority if urgent is None else urgent,
            rank=_header_int(request, "x-data-parallel-rank"),
            prompts=prompts,
            params=list(params),
            timeline=JobTimeline.of(request),
            account=account_of(request.scope),
            lora=lora,
        )
        if job.account is not None:
            job.account.add_prompt(sum(len(prompt.token_ids) for prompt in prompts))
        if self.settings.log.enable_log_requests:
            for prompt in prompts:
                shown = self._cut(prompt.text)
                logger.info("Received request %s: params: %s, prompt: %r", job.id, params[0], shown)
        return job

    def _model(self, name: str | None, request: Request) -> tuple[str, LoRARequest | None]:
        """What the answer calls the model, and the adapter if it is one, which may have gone since."""
        names = self.engine.facts.model_names
        if not name or name in names:
            return names[0], None
        lora = self.adapters.take(name, request.scope)
        if lora is None:
            raise no_model(name)
        return name, lora

    def speller(self, body: GenerateBody) -> Speller:
        asked = body.return_tokens_as_token_ids
        as_ids = self.settings.api.return_tokens_as_token_ids if asked is None else asked
        return Speller(self.inputs_of(body.model).tokenizer, as_ids)

    def output_limit(self, asked: int | None, prompt_len: int) -> int:
        default = self.engine.facts.default_sampling.get("max_tokens")
        return output_limit(asked, prompt_len, self.engine.inputs.max_model_len, default)

    async def answer(
        self,
        job: ApiCall,
        encoder: AnswerEncoder,
        request: Request,
        *,
        stream: bool,
        respond: Callable[[Any], Response] = json_response,
        in_order: bool = False,
        then: Callable[[list[RequestOutput]], Coroutine[Any, Any, None]] | None = None,
    ) -> Response:
        """The job done, in the words of the encoder. `in_order`: a stream goes prompt by prompt. `then`: what
        is done before a whole answer is written."""
        timeline = job.timeline
        if timeline is not None:
            encoder = Timed(encoder, timeline)
        if stream:
            outputs = await self.streamed(job, in_order=in_order)
            return EventStream(outputs, encoder=encoder, answering=self.answering)
        found = await self.answering.until_gone(request.receive, self.finished(job))
        if then is not None:
            await self.answering.until_gone(request.receive, then(found))
        response = respond(encoder.whole(found))
        if timeline is not None and timeline.header:
            response.headers[HEADER] = timeline.header
        return response

    async def streamed(self, job: ApiCall, *, in_order: bool = False) -> Outputs:
        """The outputs of all prompts as they come; with several prompts their ids are `job.engine_ids()`. Or
        `in_order`, those of one prompt after those of another."""
        started: list[Outputs] = []
        pause = Pauses()
        checking = ParamsChecker(self.engine.inputs, job.lora)
        try:
            for prompt, params, id in zip(job.prompts, job.params, job.engine_ids(), strict=True):
                assert isinstance(params, SamplingParams)
                answer = self.engine.generate(
                    prompt,
                    await checking.of(params),
                    id,
                    priority=job.priority,
                    rank=job.rank,
                    timed=job.timeline is not None,
                    account=job.account,
                    lora=job.lora,
                )
                started.append(answer)
                await pause.if_due()
        except BaseException:
            for each in started:
                await each.aclose()
            raise
        outputs: Outputs = started[0]
        if in_order:
            outputs = InOrder(started)
        elif len(started) > 1:
            outputs = Merged(dict(zip(job.engine_ids(), started, strict=True)))
        if self.settings.log.enable_log_outputs:
            outputs = Logged(outputs, job.id, self._cut)
        return outputs

    async def finished(self, job: ApiCall) -> list[RequestOutput]:
        """The whole outputs, in the order of the prompts."""
        if isinstance(job.params[0], BeamSearchParams):
            pauses = Pauses()
            works = [
                beam_search(
                    self.engine,
                    prompt,
                    params,
                    id,
                    pauses=pauses,
                    priority=job.priority,
                    rank=job.rank,
                    account=job.account,
                    lora=job.lora,
                )
                for prompt, params, id in zip(job.prompts, job.params, job.engine_ids(), strict=True)
                if isinstance(params, BeamSearchParams)
            ]
            return await all_of(works)
        outputs = await self.streamed(job)
        if len(job.prompts) == 1:
            return [await final(outputs)]
        found = await last_of_each(outputs)
        return [found[id] for id in job.engine_ids()]

    def usage(
        self,
        num_prompt: int,
        num_output: int,
        num_cached: int | None = None,
        timeline: JobTimeline | None = None,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_output,
            "completion_tokens": num_output,
        }
        if self.settings.api.enable_prompt_tokens_details and num_cached is not None:
            found["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if timeline is not None and timeline.told is not None:
            found["timeline"] = timeline.told
        return found

    def metrics(self, stats: RequestStateStats | None, num_sequences: int) -> dict[str, Any] | None:
        """Of a request with one answer, if they are told at all."""
        if not self.settings.api.enable_per_request_metrics or stats is None or num_sequences != 1:
            return None
        return request_metrics(stats)

    def _cut(self, text: str | None) -> str:
        return (text or "")[: self.settings.log.max_log_len]


def _fingerprint(api: ApiSection, facts: EngineFactsLike) -> str | None:
    known = repr((facts.model_names, facts.root, facts.vocab))
    digest = hashlib.sha256(known.encode()).hexdigest()[:8]
    match api.fingerprint_mode:
        case "full":
            return f"quire-{facts.version}-{digest}"
        case "hash":
            return digest
        case "custom":
            return api.fingerprint_value
    return None


def no_model(name: str) -> NotFound:
    return NotFound(f"The model `{printable(name)}` does not exist.", param="model")


def _check_id(id: str) -> None:
    """Refuse an id that could not stand in a line of the log."""
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
