"""What the routes of pooling models share: prompts that run together and are answered in order."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.errors import RequestError
from quire.frontend.inputs import Prompt
from quire.server.engine import PooledOutputs
from quire.server.openai.prompts import Wait, each_of
from quire.server.openai.sampling_params import check_fields, check_template
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.openai.streams import Pauses
from quire.server.pooling.bodies import InputBody, PoolingBody, PoolingChatBody
from quire.system.tasks import ended

Pooled = PoolingRequestOutput[PoolingOutput]
T = TypeVar("T")


async def check_pooling(api: GenerationService, body: PoolingBody) -> None:
    await api.check_model(body.model, pools=True)
    check_fields(body)


def check_count(api: GenerationService, count: int, param: str) -> None:
    most = api.settings.max_sequences
    if count > most:
        raise RequestError(
            f"{count} inputs are more than one call may bring, which is {most} (VLLM_MAX_N_SEQUENCES); send "
            "fewer at once",
            param=param,
        )


def named(field: str, given: Sequence[T]) -> list[tuple[str, T]]:
    """Each with the name that an error calls it by."""
    return [(f"{field}[{place}]" if len(given) > 1 else field, each) for place, each in enumerate(given)]


def waiting(api: GenerationService, request: Request) -> Wait:
    """How what takes long is waited for: it ends when the client hangs up."""
    return partial(api.answering.until_gone, request.receive)


async def read_inputs(
    api: GenerationService, body: InputBody | PoolingChatBody, request: Request
) -> list[Prompt]:
    if isinstance(body, PoolingChatBody):
        check_template(body.chat_template, api.settings.api.trust_request_chat_template)
        return [await api.reader.of_conversation(body, waiting(api, request))]
    given = each_of(body.input)
    check_count(api, len(given), "input")
    return await api.reader.of_inputs(named("input", given), body, add_special_tokens=body.add_special_tokens)


async def pool(
    api: GenerationService,
    kind: str,
    body: PoolingBody,
    request: Request,
    prompts: list[Prompt],
    *,
    task: Any = None,
    dimensions: int | None = None,
) -> tuple[ApiCall, list[Pooled]]:
    """What the model makes of the prompts, in their order. All of them end when the client hangs up."""
    params = PoolingParams(task=task, use_activation=body.activates, dimensions=dimensions)
    job = api.job(kind, body, request, prompts, [params] * len(prompts))
    return job, await api.answering.until_gone(request.receive, _together(api, job))


async def _together(api: GenerationService, job: ApiCall) -> list[Pooled]:
    tasks: list[asyncio.Task[Pooled]] = []
    pause = Pauses()
    try:
        for prompt, params, id in zip(job.prompts, job.params, job.engine_ids(), strict=True):
            assert isinstance(params, PoolingParams)
            answer = api.engine.encode(
                prompt,
                params,
                id,
                priority=job.priority,
                rank=job.rank,
                account=job.account,
                lora=job.lora,
            )
            tasks.append(asyncio.create_task(_only(answer)))
            await pause.if_due()
        return list(await asyncio.gather(*tasks))
    finally:
        await ended(tasks)


async def _only(answer: PooledOutputs) -> Pooled:
    try:
        return await answer.__anext__()
    finally:
        await answer.aclose()


def usage(api: GenerationService, outputs: Sequence[Pooled]) -> dict[str, Any]:
    num_prompt = sum(len(each.prompt_token_ids) for each in outputs)
    return api.usage(num_prompt, 0, sum(each.num_cached_tokens for each in outputs))


def listing(
    api: GenerationService, job: ApiCall, data: list[dict[str, Any]], outputs: Sequence[Pooled]
) -> dict[str, Any]:
    """The answer around the results."""
    return {
        "id": job.id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": data,
        "usage": usage(api, outputs),
    }
