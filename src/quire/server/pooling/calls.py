"""Code shared by the pooling routes: prompts run concurrently and are answered in order, with vectors as JSON
numbers, base64 or raw bytes."""

import asyncio
import base64
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.data.pooling import Floats, PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import OutputStream
from quire.server.http.errors import json_response
from quire.server.openai.api_call import ApiCall, new_call
from quire.server.openai.prompts import list_prompts
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.sampling_params import check_fields, check_template
from quire.server.openai.service import GenerationService
from quire.server.openai.work_size import off_loop
from quire.server.pooling.bodies import InputBody, PoolingBody, PoolingChatBody, VectorOptions
from quire.system.tasks import cancel_all

Pooled = PoolingRequestOutput[PoolingOutput]
T = TypeVar("T")


def name_inputs(field: str, values: Sequence[T]) -> list[tuple[str, T]]:
    """Return (name, value) pairs. Errors mention a value by its name: `field`, or `field[index]` if there are
    several values."""
    return [(f"{field}[{index}]" if len(values) > 1 else field, value) for index, value in enumerate(values)]


async def pool_inputs(
    api: GenerationService, id_prefix: str, body: InputBody | PoolingChatBody, request: Request, **params: Any
) -> tuple[ApiCall, list[Pooled]]:
    """Run the model on the inputs of a body. `params`: further keyword arguments of `pool`."""
    model = await api.names.find(body.model, request, pools=True)
    check_fields(body)
    if isinstance(body, PoolingChatBody):
        check_template(body.chat_template, api.settings.api.trust_request_chat_template)
        wait = partial(api.running_requests.until_disconnect, request.receive)
        prompts = [await api.reader.read_chat(body, model, 0, wait)]
    else:
        inputs, special = list_prompts(body.input), body.add_special_tokens
        api.check_count(len(inputs), "inputs", param="input")
        named_inputs = name_inputs("input", inputs)
        prompts = await api.reader.read_inputs(named_inputs, body, model, add_special_tokens=special)
    return await pool(api, id_prefix, body, request, model, prompts, **params)


async def pool(
    api: GenerationService,
    id_prefix: str,
    body: PoolingBody,
    request: Request,
    model: RequestedModel,
    prompts: list[Prompt],
    *,
    task: Any = None,
    dimensions: int | None = None,
) -> tuple[ApiCall, list[Pooled]]:
    """Run a pooling `task` on the prompts. Return the API call and the output of each prompt, in their order.
    `dimensions`: the length of the embeddings. All requests are cancelled if the client disconnects."""
    params = PoolingParams(task=task, use_activation=body.activates, dimensions=dimensions)
    call = new_call(api, id_prefix, body, request, model, prompts, [params] * len(prompts))
    return call, await api.running_requests.until_disconnect(request.receive, _run_all(api, call))


async def _run_all(api: GenerationService, call: ApiCall) -> list[Pooled]:
    tasks: list[asyncio.Task[Pooled]] = []
    pause = api.pauses()
    try:
        for prompt, params, id in zip(call.prompts, call.params, call.engine_ids(), strict=True):
            assert isinstance(params, PoolingParams)
            answer = api.engine.encode(prompt, params, id, **call.routing)
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


def list_reply(
    api: GenerationService, call: ApiCall, data: list[dict[str, Any]], outputs: Sequence[Pooled]
) -> dict[str, Any]:
    return call.frame("list") | {"data": data, "usage": usage(api, outputs)}


_ORDERS = {"native": "=", "little": "<", "big": ">"}


def pack_values(values: Floats, dtype: str, endianness: str) -> bytes:
    """Return the values in row-major order as bytes of `dtype` (float32, float16 or bfloat16) and byte order
    `endianness` (native, little or big)."""
    order = _ORDERS[endianness]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        to_even = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return ((bits + to_even) >> np.uint32(16)).astype(f"{order}u2").tobytes()
    return values.astype(f"{order}{'f2' if dtype == 'float16' else 'f4'}").tobytes()


async def answer_vectors(
    api: GenerationService,
    body: VectorOptions,
    call: ApiCall,
    outputs: Sequence[Pooled],
    *,
    object: str,
    field: str,
) -> Response:
    """Return the vectors of all outputs, as raw bytes if the body requests them, otherwise as a list of JSON
    objects. Each object has the vector under the key `field`, and `object` as its key "object"."""

    def encode_values(values: Floats) -> list[Any] | str:
        if body.encoding_format == "float":
            return list(values.tolist())
        return base64.b64encode(pack_values(values, body.embed_dtype, body.endianness)).decode()

    def encode() -> Response:
        if body.encoding_format in ("bytes", "bytes_only"):
            return _bytes(api, body, call, outputs, object)
        data = [
            {"index": index, "object": object, field: encode_values(output.outputs.data)}
            for index, output in enumerate(outputs)
        ]
        return json_response(list_reply(api, call, data, outputs))

    return await off_loop(sum(output.outputs.data.size for output in outputs), encode)


def _bytes(
    api: GenerationService, body: VectorOptions, call: ApiCall, outputs: Sequence[Pooled], object: str
) -> Response:
    parts, data, start = [], [], 0
    for index, output in enumerate(outputs):
        parts.append(pack_values(output.outputs.data, body.embed_dtype, body.endianness))
        end = start + len(parts[-1])
        data.append(
            {
                "index": index,
                "object": object,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": start,
                "end": end,
                "shape": list(output.outputs.data.shape),
            }
        )
        start = end
    headers = {}
    if body.encoding_format == "bytes":
        headers["metadata"] = json.dumps(list_reply(api, call, data, outputs))
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")
