"""/v1/embeddings, /pooling and /classify: one result per input."""

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.errors import json_response
from quire.server.openai.service import GenerationService
from quire.server.pooling.bodies import (
    EmbeddingChatBody,
    EmbeddingInput,
    InputBody,
    PoolingChatBody,
    PoolingChatRequest,
    PoolingInputBody,
)
from quire.server.pooling.jobs import check_pooling, listing, pool, read_inputs
from quire.server.pooling.vectors import answer_vectors


async def answer_embeddings(
    api: GenerationService, body: EmbeddingInput | EmbeddingChatBody, request: Request
) -> Response:
    await check_pooling(api, body)
    prompts = await read_inputs(api, body, request)
    job, outputs = await pool(api, "embd", body, request, prompts, task="embed", dimensions=body.dimensions)
    return await answer_vectors(api, body, job, outputs, kind="embedding", field="embedding")


async def answer_pooling(
    api: GenerationService, body: PoolingInputBody | PoolingChatRequest, request: Request
) -> Response:
    await check_pooling(api, body)
    prompts = await read_inputs(api, body, request)
    job, outputs = await pool(
        api, "pooling", body, request, prompts, task=body.task, dimensions=body.dimensions
    )
    return await answer_vectors(api, body, job, outputs, kind="pooling", field="data")


async def answer_classify(
    api: GenerationService, body: InputBody | PoolingChatBody, request: Request
) -> Response:
    await check_pooling(api, body)
    prompts = await read_inputs(api, body, request)
    job, outputs = await pool(api, "classify", body, request, prompts, task="classify")
    pooling = api.engine.inputs.pooling
    names = dict(enumerate(pooling.labels if pooling else ()))
    data = [
        {
            "index": index,
            "label": names.get(int(np.argmax(output.outputs.data))),
            "probs": output.outputs.data.tolist(),
            "num_classes": output.outputs.data.size,
        }
        for index, output in enumerate(outputs)
    ]
    return json_response(listing(api, job, data, outputs))
