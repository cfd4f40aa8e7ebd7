"""Code shared by the pooling routes: prompts run concurrently and are answered in order."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.errors import RequestError
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import OutputStream
from quire.server.openai.prompts import Wait, list_prompts
from quire.server.openai.sampling_params import check_fields, check_template
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.openai.streams import Pauses
from quire.server.pooling.bodies import InputBody, PoolingBody, PoolingChatBody
from quire.system.tasks import cancel_all

Pooled = PoolingRequestOutput[PoolingOutput]
T = TypeVar("T")


async def check_pooling(api: GenerationService, body: PoolingBody) -> None:
    await api.check_model(body.model, pools=True)
    check_fields(body)


def check_count(api: GenerationService, count: int, param: str) -> None:
    limit = api.settings.max_sequences
    if count > limit:
        raise RequestError(
            f"{count} inputs exceed the maximum of {limit} per request (VLLM_MAX_N_SEQUENCES); send "
            "fewer at once",
            param=param,
        )


def named(field: str, values: Sequence[T]) -> list[tuple[str, T]]:
    """Return the values, each with the name that errors use for it."""
    return [(f"{field}[{place}]" if len(values) > 1 else field, value) for place, value in enumerate(values)]


def waiting(api: GenerationService, request: Request) -> Wait:
    """Return a function that awaits a long operation and cancels it if the client disconnects."""
    return partial(api.answering.until_gone, request.receive)


async def read_inputs(
    api: GenerationService, body: InputBody | PoolingChatBody, request: Request
) -> list[Prompt]:
    if isinstance(body, PoolingChatBody):
        check_template(body.chat_template, api.settings.api.trust_request_chat_template)
        return [await api.reader.of_conversation(body, waiting(api, request))]
    inputs = list_prompts(body.input)
    check_count(api, len(inputs), "input")
    return await api.reader.of_inputs(
        named("input", inputs), body, add_special_tokens=body.add_special_tokens
    )


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
    """Return the model's outputs in the order of the prompts. All are cancelled if the client disconnects."""
    params = PoolingParams(task=task, use_activation=body.activates, dimensions=dimensions)
    job = api.job(kind, body, request, prompts, [params] * len(prompts))
    return job, await api.answering.until_gone(request.receive, _run_all(api, job))


async def _run_all(api: GenerationService, job: ApiCall) -> list[Pooled]:
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
            tasks.append(asyncio.create_task(_await_output(answer)))
            await pause.if_due()
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def _await_output(answer: OutputStream[Pooled]) -> Pooled:
    try:
        return await answer.__anext__()
    finally:
        await answer.aclose()


def usage(api: GenerationService, outputs: Sequence[Pooled]) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return api.usage(num_prompt, 0, sum(output.num_cached_tokens for output in outputs))


def listing(
    api: GenerationService, job: ApiCall, data: list[dict[str, Any]], outputs: Sequence[Pooled]
) -> dict[str, Any]:
    """Return the body of a reply with these results."""
    return {
        "id": job.id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": data,
        "usage": usage(api, outputs),
    }
