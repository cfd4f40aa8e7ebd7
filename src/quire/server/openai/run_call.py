"""Running a call on the engine, and answering with its outputs, whole or as a stream of events."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.data.outputs import PromptLogprobs, RequestOutput, SampleLogprobs
from quire.data.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.frontend.checked_params import CheckedParams
from quire.frontend.output_stream import Outputs
from quire.server.http.errors import json_response
from quire.server.http.sse import AnswerEncoder, EventStream
from quire.server.openai.api_call import ApiCall
from quire.server.openai.load_header import add_load_header
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.service import GenerationService
from quire.server.openai.streams import (
    LoggedOutputs,
    MergedOutputs,
    OrderedOutputs,
    beam_search,
    collect_final_outputs,
    final_output,
    gather_all,
)
from quire.server.openai.timeline import TIMELINE_HEADER
from quire.server.openai.work_size import off_loop, params_size

_COMPILE_S = 5.0
"""Maximum seconds to compile the grammar of a call; longer compilation fails the request."""
_CHOICE_SIZE, _LOGPROB_SIZE = 32, 4
"""Cost of encoding a choice, and of one logprob, in the unit of `answer_size`."""


async def answer_call(
    api: GenerationService,
    call: ApiCall,
    encoder: AnswerEncoder,
    request: Request,
    *,
    stream: bool,
    respond: Callable[[Any], Response] = json_response,
    in_order: bool = False,
    before_encoding: Callable[[list[RequestOutput]], Coroutine[Any, Any, None]] | None = None,
) -> Response:
    """Run the call and return its response, which `encoder` encodes. `in_order`: a stream has all outputs of
    a prompt before those of the next prompt. Without a stream, `before_encoding` is awaited with the final
    outputs, and `respond` turns the encoded body into the HTTP response."""
    timeline = call.timeline
    if stream:
        outputs = await stream_call(api, call, in_order=in_order)
        on_output = None if timeline is None else timeline.add_output
        return EventStream(
            outputs, encoder=encoder, running_requests=api.running_requests, on_output=on_output
        )
    until_disconnect = partial(api.running_requests.until_disconnect, request.receive)
    finals = await until_disconnect(final_outputs(api, call))
    if before_encoding is not None:
        await until_disconnect(before_encoding(finals))
    if timeline is None:
        response = await off_loop(answer_size(finals), lambda: respond(encoder.response_body(finals)))
    else:
        for output in finals:
            timeline.add_output(output)
        response = respond(timeline.add_to(encoder.response_body(finals)))
        if timeline.header:
            response.headers[TIMELINE_HEADER] = timeline.header
    add_load_header(response, request, api.engine)
    return response


async def stream_call(api: GenerationService, call: ApiCall, *, in_order: bool = False) -> Outputs:
    """Start the requests and return their outputs as they arrive. With several prompts, the ids are
    `call.engine_ids()`. With `in_order`, all outputs of a prompt precede those of the next prompt."""
    streams: list[Outputs] = []
    pause = api.pauses()
    checker = ParamsChecker(call.model)
    try:
        for prompt, params, id in zip(call.prompts, call.params, call.engine_ids(), strict=True):
            assert isinstance(params, SamplingParams)
            checked, timed = await checker.of(params), call.timeline is not None
            streams.append(api.engine.generate(prompt, checked, id, timed=timed, **call.routing))
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
    if api.settings.log.enable_log_outputs:
        outputs = LoggedOutputs(outputs, call.id, api.shorten)
    return outputs


async def final_outputs(api: GenerationService, call: ApiCall) -> list[RequestOutput]:
    """Run the call to its end and return one final output per prompt, in the order of the prompts."""
    if isinstance(call.params[0], BeamSearchParams):
        pauses = api.pauses()
        coroutines = [
            beam_search(api.engine, prompt, params, id, pauses=pauses, model=call.model, routing=call.routing)
            for prompt, params, id in zip(call.prompts, call.params, call.engine_ids(), strict=True)
            if isinstance(params, BeamSearchParams)
        ]
        return await gather_all(coroutines)
    outputs = await stream_call(api, call)
    if len(call.prompts) == 1:
        return [await final_output(outputs)]
    last = await collect_final_outputs(outputs)
    return [last[id] for id in call.engine_ids()]


class ParamsChecker:
    """Checker of the sampling parameters of one call. Shared parameters and equal grammars are checked once;
    long parameters and grammars are checked in a thread."""

    def __init__(self, model: RequestedModel) -> None:
        self._model = model
        self._checked: dict[int, CheckedParams] = {}
        """Results of the checks by `id()` of the parameters."""
        self._grammar: StructuredOutputsParams | None = None

    async def of(self, params: SamplingParams) -> CheckedParams:
        """Check sampling parameters; raise RequestError if they are invalid. Return the result, which prompts
        with the same params object share."""
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
