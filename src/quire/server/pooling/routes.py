"""The routes of pooling models: /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank."""

from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.frontend.pooling import embedding_task, pairs, pools, reads_pairs, similarity
from quire.frontend.score_inputs import ROLES, ScoreInput, ScoreInputs
from quire.server.http.errors import json_response
from quire.server.http.openapi_document import add_post
from quire.server.openai.api_call import ApiCall
from quire.server.openai.sampling_params import check_fields
from quire.server.openai.service import GenerationService
from quire.server.openai.work_size import off_loop
from quire.server.pooling.bodies import (
    ClassifyReply,
    ContentParts,
    EmbeddingChatBody,
    EmbeddingInput,
    EmbeddingReply,
    InputBody,
    PoolingChatBody,
    PoolingChatRequest,
    PoolingInputBody,
    PoolingReply,
    RerankBody,
    RerankReply,
    ScoreBody,
    ScoreReply,
    Texts,
)
from quire.server.pooling.calls import (
    Pooled,
    answer_vectors,
    list_reply,
    name_inputs,
    pool,
    pool_inputs,
    usage,
)
from quire.server.pooling.cohere import CohereReply, create_cohere_embeddings

Text = str | ContentParts


def add_pooling_routes(app: FastAPI, api: GenerationService) -> None:
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    add_post(app, api, "/v1/embeddings", create_embeddings, EmbeddingReply, content=octets)
    add_post(app, api, "/v2/embed", create_cohere_embeddings, CohereReply)
    add_post(app, api, "/pooling", create_pooling, PoolingReply, content=octets)
    add_post(app, api, "/classify", create_classes, ClassifyReply)
    for path in ("/score", "/v1/score"):
        add_post(app, api, path, create_score, ScoreReply)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        add_post(app, api, path, create_rerank, RerankReply)


async def create_embeddings(
    api: GenerationService, body: EmbeddingInput | EmbeddingChatBody, request: Request
) -> Response:
    """Compute an embedding for each input."""
    call, outputs = await pool_inputs(api, "embd", body, request, task="embed", dimensions=body.dimensions)
    return await answer_vectors(api, body, call, outputs, object="embedding", field="embedding")


async def create_pooling(
    api: GenerationService, body: PoolingInputBody | PoolingChatRequest, request: Request
) -> Response:
    """Run the model's pooling task, or compute vectors or classes of every token."""
    call, outputs = await pool_inputs(
        api, "pooling", body, request, task=body.task, dimensions=body.dimensions
    )
    return await answer_vectors(api, body, call, outputs, object="pooling", field="data")


async def create_classes(
    api: GenerationService, body: InputBody | PoolingChatBody, request: Request
) -> Response:
    """Compute the class probabilities of each input."""
    call, outputs = await pool_inputs(api, "classify", body, request, task="classify")
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
    return json_response(list_reply(api, call, data, outputs))


async def create_score(api: GenerationService, body: ScoreBody, request: Request) -> Response:
    """Score the similarity of pairs of texts: one to one, one to many, or two lists of equal length."""
    sides = {"text_1": _as_list(body.text_1), "text_2": _as_list(body.text_2)}
    call, outputs = await _score(api, "score", body, request, sides)
    data = [
        {"index": index, "object": "score", "score": output.outputs.data.item()}
        for index, output in enumerate(outputs)
    ]
    return json_response(list_reply(api, call, data, outputs))


async def create_rerank(api: GenerationService, body: RerankBody, request: Request) -> Response:
    """Order documents by their relevance to a query."""
    documents = _as_list(body.documents)
    sides = {"query": [body.query], "documents": documents}
    call, outputs = await _score(api, "rerank", body, request, sides)
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": {"text": document}
            if isinstance(document, str)
            else {"multi_modal": document.content},
            "relevance_score": output.outputs.data.item(),
        }
        for index, (document, output) in enumerate(zip(documents, outputs, strict=True))
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    tokens = usage(api, outputs)
    del tokens["completion_tokens"]
    return json_response(
        {"id": call.id, "model": call.model.name, "usage": tokens, "results": results[: body.top_n or None]}
    )


def _as_list(texts: Texts) -> list[Text]:
    return texts if isinstance(texts, list) else [texts]


async def _score(
    api: GenerationService,
    kind: str,
    body: ScoreBody | RerankBody,
    request: Request,
    texts: dict[str, list[Text]],
) -> tuple[ApiCall, list[Pooled]]:
    """Return the API call and an output with the score for each pair of texts. `texts` has both sides of the
    pairs by field name: one to one or one to many. The score is that of a cross-encoder, which reads both
    texts at once, or the cosine similarity of two embeddings (MaxSim for token embeddings)."""
    model = await api.names.find(body.model, request, pools=True)
    check_fields(body)
    (_, firsts), (second, seconds) = texts.items()
    api.check_count(max(len(firsts), len(seconds)), "inputs", param=second)
    sides = [
        [(name, _score_input(text, role, name, body.cache_salt)) for name, text in name_inputs(field, side)]
        for (field, side), role in zip(texts.items(), ROLES, strict=True)
    ]
    wait, input_pairs = partial(api.running_requests.until_disconnect, request.receive), pairs(*sides)
    pooling = pools(api.engine.inputs.pooling, kind)
    if reads_pairs(pooling):
        both = [_pair(first, second) for (_, first), (_, second) in input_pairs]
        prompts = await api.reader.read_inputs(name_inputs(second, both), body, model, wait=wait)
        return await pool(api, kind, body, request, model, prompts, task="classify")
    single_inputs = [
        (name, ScoreInputs((value,)) if isinstance(value, ScoreInput) else value)
        for side in sides
        for name, value in side
    ]
    prompts = await api.reader.read_inputs(single_inputs, body, model, wait=wait)
    call, embeddings = await pool(api, kind, body, request, model, prompts, task=embedding_task(pooling))
    embedding_pairs = pairs(embeddings[: len(firsts)], embeddings[len(firsts) :])
    size = sum(embedding.outputs.data.size for embedding in embeddings)
    return call, await off_loop(size, lambda: [similarity(*pair) for pair in embedding_pairs])


def _score_input(text: Text, role: str, name: str, salt: str | None) -> str | ScoreInput:
    return text if isinstance(text, str) else ScoreInput.of(role, text.content, name, salt)


def _pair(first: str | ScoreInput, second: str | ScoreInput) -> tuple[str, str] | ScoreInputs:
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    both = zip(ROLES, (first, second), strict=True)
    return ScoreInputs(
        tuple(ScoreInput.of(role, side, role) if isinstance(side, str) else side for role, side in both)
    )
