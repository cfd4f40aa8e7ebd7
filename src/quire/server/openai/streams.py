"""Streams of outputs: merged, ordered or logged outputs of several requests, and beam search in rounds of
one-token requests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from quire.data.outputs import BeamSearchSequence, CompletionOutput, RequestOutput
from quire.data.params import BeamSearchParams, RequestOutputKind
from quire.errors import EngineError
from quire.frontend.beam import BeamSearch, beam_prompt, initial_tokens, round_params
from quire.frontend.engine import AsyncEngine
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import Outputs, OutputStream
from quire.logs import get_logger
from quire.server.openai.requested_model import RequestedModel
from quire.system.tasks import cancel_all
from quire.text.tokenizer import Tokenizer

logger = get_logger(__name__)

MAX_BLOCKING_S = 0.005
"""Seconds for which a large call may block the event loop at a time."""


class Pauses:
    """Pauses that yield to the event loop within a large call. Several tasks of one call may share an
    instance, and several calls may share `lock`: then one task at a time resumes."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, lock: asyncio.Lock | None = None
    ) -> None:
        self._clock = clock
        self._resumed_at = clock()
        self._lock = lock or asyncio.Lock()

    async def if_due(self) -> None:
        """Yield to the event loop if the call has blocked it for `MAX_BLOCKING_S`."""
        if self._clock() - self._resumed_at < MAX_BLOCKING_S:
            return
        async with self._lock:
            await asyncio.sleep(0)
            self._resumed_at = self._clock()


async def collect_final_outputs(outputs: Outputs) -> dict[str, RequestOutput]:
    """Return the last output of each request, by id."""
    last = {}
    try:
        async for output in outputs:
            last[output.request_id] = output
    finally:
        await outputs.aclose()
    return last


class LoggedOutputs:
    """Stream that passes on the outputs of another stream, and logs the generated texts when it is closed,
    each shortened by `cut`."""

    def __init__(self, outputs: Outputs, name: str, cut: Callable[[str], str]) -> None:
        self._outputs, self._name, self._cut = outputs, name, cut
        self._texts: dict[tuple[str, int], list[str]] = {}

    def __aiter__(self) -> "LoggedOutputs":
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._outputs.__anext__()
        for choice in output.outputs:
            self._texts.setdefault((output.request_id, choice.index), []).append(choice.text)
        return output

    async def aclose(self) -> None:
        await self._outputs.aclose()
        while self._texts:
            _, texts = self._texts.popitem()
            logger.info("Generated response %s: %r", self._name, self._cut("".join(texts)))


class MergedOutputs:
    """Outputs of several requests as one stream, in order of arrival. The keys of `streams` become the
    request ids of the outputs."""

    def __init__(self, streams: Mapping[str, Outputs], pauses: Pauses) -> None:
        self._streams, self._pauses = streams, pauses
        self._arrived: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def __aiter__(self) -> "MergedOutputs":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._task is None:
            self._task = asyncio.create_task(self._queue())
        item = await self._arrived.get()
        if isinstance(item, RequestOutput):
            return item
        self._arrived.put_nowait(item)  # the next call gets the same end or error
        raise StopAsyncIteration if item is None else item

    async def _queue(self) -> None:
        try:
            await self.forward(self._arrived.put_nowait)
        except Exception as error:  # passed to the reader, which raises it
            self._arrived.put_nowait(error)
        else:
            self._arrived.put_nowait(None)

    async def forward(
        self, reader: Callable[[RequestOutput], None], text_reader: Callable[[str, int], None] | None = None
    ) -> None:
        """Pass all outputs of all requests to `reader` as soon as they arrive. `text_reader`, for outputs
        with nothing but text, is not used: it does not get the request's id."""
        futures: list[asyncio.Future[None]] = []
        try:
            for id, outputs in self._streams.items():
                futures.append(_push(id, outputs, reader))
                await self._pauses.if_due()
            await asyncio.gather(*futures)
        finally:
            while futures:
                futures.pop().cancel()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for outputs in self._streams.values():
            await outputs.aclose()


class OrderedOutputs:
    """Stream of the outputs of several requests, one request after another. Outputs of later requests are
    kept until the earlier requests have finished."""

    def __init__(self, streams: Sequence[Outputs]) -> None:
        self._streams = streams
        self._waiting: deque[asyncio.Task[RequestOutput]] | None = None
        """Tasks that wait for the next output of each unfinished request."""

    def __aiter__(self) -> "OrderedOutputs":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._waiting is None:
            self._waiting = deque(asyncio.create_task(_next(outputs)) for outputs in self._streams)
        if not self._waiting:
            raise StopAsyncIteration
        output = await self._waiting[0]
        if output.finished:
            self._waiting.popleft()
        else:
            index = len(self._streams) - len(self._waiting)
            self._waiting[0] = asyncio.create_task(_next(self._streams[index]))
        return output

    async def aclose(self) -> None:
        waiting = self._waiting or ()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for outputs in self._streams:
            await outputs.aclose()


async def _next(outputs: Outputs) -> RequestOutput:
    return await outputs.__anext__()


def _push(id: str, outputs: Outputs, reader: Callable[[RequestOutput], None]) -> asyncio.Future[None]:
    """Start passing `outputs`, with `id` as their request id, to `reader`. The returned future is done after
    the last output."""

    def forward_named(output: RequestOutput) -> None:
        output.request_id = id
        reader(output)

    if isinstance(outputs, OutputStream):  # without a task: a call may have a thousand prompts
        return outputs.push(forward_named)
    return asyncio.create_task(_forward(outputs, forward_named))


async def _forward(outputs: Outputs, reader: Callable[[RequestOutput], None]) -> None:
    try:
        async for output in outputs:
            reader(output)
    finally:
        await outputs.aclose()


T = TypeVar("T")


async def beam_search(
    engine: AsyncEngine,
    prompt: Prompt,
    params: BeamSearchParams,
    request_id: str,
    *,
    pauses: Pauses,
    model: RequestedModel,
    routing: Mapping[str, Any],
) -> RequestOutput:
    """Return the best continuations of one prompt, as choices of one output. `routing`: keyword arguments of
    `engine.generate`. All prompts of an API call share `pauses`, `model` and `routing`."""
    eos_ids = model.inputs.eos_ids
    search = BeamSearch(
        initial_tokens(prompt),
        params,
        eos_id=eos_ids[0] if eos_ids else None,
        max_len=model.inputs.max_model_len,
    )
    step = round_params(params)
    step.output_kind = RequestOutputKind.FINAL_ONLY
    checked = model.inputs.check(step, lora=model.lora)
    num_rounds, num_cached = 0, 0
    while not search.finished:
        beams = []
        for index, beam in enumerate(search.live):
            await pauses.if_due()
            id = f"{request_id}-{num_rounds}-{index}"
            beams.append(engine.generate(beam_prompt(prompt, beam.tokens), checked, id, **routing))
        outputs = await gather_all([final_output(beam) for beam in beams])
        num_cached = num_cached if num_rounds else outputs[0].num_cached_tokens or 0
        await pauses.if_due()
        positions: list[Any] = [output.outputs[0].logprobs for output in outputs]
        search.advance([position[0] for position in positions])
        num_rounds += 1
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=None,
        outputs=[
            _completion(model.tokenizer, i, beam, search.prompt_len) for i, beam in enumerate(search.best())
        ],
        finished=True,
        num_cached_tokens=num_cached,
    )


def _completion(
    tokenizer: Tokenizer | None, index: int, beam: BeamSearchSequence, prompt_len: int
) -> CompletionOutput:
    ids = beam.tokens[prompt_len:]
    return CompletionOutput(
        index=index,
        text=tokenizer.decode(ids) if tokenizer else "",
        token_ids=ids,
        cumulative_logprob=beam.cum_logprob,
        logprobs=beam.logprobs[: len(ids)],
        finish_reason=beam.finish_reason,
        stop_reason=None,
    )


async def final_output(outputs: Outputs) -> RequestOutput:
    """Return the last output of a request; the request is aborted if this fails."""
    last = await collect_final_outputs(outputs)
    if not last:
        raise EngineError("the engine ended a request without an output")
    return last.popitem()[1]


async def gather_all(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results. If one fails, cancel the others before its
    error is raised."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(work) for work in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)
