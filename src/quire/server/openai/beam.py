"""Beam search over HTTP: rounds of one-token requests to the engine."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from quire.data.lora import LoRARequest
from quire.data.outputs import BeamSearchSequence, CompletionOutput, RequestOutput
from quire.data.params import BeamSearchParams, RequestOutputKind
from quire.errors import EngineError
from quire.frontend.beam import BeamSearch, continued, round_params, start_of
from quire.frontend.engine import AsyncEngine
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import Outputs
from quire.metrics.keys import KeyAccount
from quire.server.openai.streams import Pauses
from quire.system.tasks import cancel_all
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")


async def beam_search(
    engine: AsyncEngine,
    prompt: Prompt,
    params: BeamSearchParams,
    request_id: str,
    *,
    pauses: Pauses,
    priority: int,
    rank: int | None = None,
    account: KeyAccount | None = None,
    lora: LoRARequest | None = None,
) -> RequestOutput:
    """Search the best continuations of one prompt. All prompts of the call share `pauses`."""
    eos_ids = engine.inputs.of(lora).eos_ids
    search = BeamSearch(
        start_of(prompt), params, eos_id=eos_ids[0] if eos_ids else None, max_len=engine.inputs.max_model_len
    )
    step = round_params(params)
    step.output_kind = RequestOutputKind.FINAL_ONLY
    checked = engine.inputs.check(step, lora=lora)
    num_rounds, num_cached = 0, 0
    while not search.finished:
        beams = []
        for index, beam in enumerate(search.live):
            await pauses.if_due()
            beams.append(
                engine.generate(
                    continued(prompt, beam.tokens),
                    checked,
                    f"{request_id}-{num_rounds}-{index}",
                    priority=priority,
                    rank=rank,
                    account=account,
                    lora=lora,
                )
            )
        outputs = await all_of([final(beam) for beam in beams])
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
            _completion(engine.inputs.tokenizer_of(lora), i, beam, search.prompt_len)
            for i, beam in enumerate(search.best())
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


async def final(outputs: Outputs) -> RequestOutput:
    """Return the last output of a request; the request is aborted if this fails."""
    last = None
    try:
        async for output in outputs:
            last = output
    finally:
        await outputs.aclose()
    if last is None:
        raise EngineError("the engine ended a request without an output")
    return last


async def all_of(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. If one fails, cancel the others before its error is raised."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)
