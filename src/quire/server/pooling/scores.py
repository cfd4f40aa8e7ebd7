"""/score and /rerank: pairs of texts, or of texts and media."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.pooling import cosine, pairs, pools, reads_pairs
from quire.frontend.score_inputs import ROLES, ScoreInput, ScoreInputs
from quire.server.http.errors import json_response
from quire.server.openai.prompts import off_loop
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.pooling.bodies import ContentParts, RerankBody, ScoreBody, Texts
from quire.server.pooling.jobs import (
    Pooled,
    check_count,
    check_pooling,
    listing,
    named,
    pool,
    usage,
    waiting,
)

Text = str | ContentParts


async def answer_score(api: GenerationService, body: ScoreBody, request: Request) -> Response:
    sides = {"text_1": _as_list(body.text_1), "text_2": _as_list(body.text_2)}
    job, outputs = await _score(api, "score", body, request, sides)
    data = [
        {"index": index, "object": "score", "score": output.outputs.data.item()}
        for index, output in enumerate(outputs)
    ]
    return json_response(listing(api, job, data, outputs))


async def answer_rerank(api: GenerationService, body: RerankBody, request: Request) -> Response:
    documents = _as_list(body.documents)
    job, outputs = await _score(api, "rerank", body, request, {"query": [body.query], "documents": documents})
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": _document_fields(document),
            "relevance_score": output.outputs.data.item(),
        }
        for index, (document, output) in enumerate(zip(documents, outputs, strict=True))
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    tokens = usage(api, outputs)
    del tokens["completion_tokens"]
    return json_response(
        {"id": job.id, "model": job.model, "usage": tokens, "results": results[: body.top_n or None]}
    )


def _as_list(texts: Texts) -> list[Text]:
    return texts if isinstance(texts, list) else [texts]


def _document_fields(document: Text) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else {"multi_modal": document.content}


async def _score(
    api: GenerationService,
    kind: str,
    body: ScoreBody | RerankBody,
    request: Request,
    texts: dict[str, list[Text]],
) -> tuple[ApiCall, list[Pooled]]:
    """Return a score for each pair. A cross-encoder reads both inputs at once; for an embedding model the
    score is the cosine similarity."""
    await check_pooling(api, body)
    (_, firsts), (second, seconds) = texts.items()
    check_count(api, max(len(firsts), len(seconds)), second)
    sides = [
        [(name, _side(text, role, name, body.cache_salt)) for name, text in named(field, side)]
        for (field, side), role in zip(texts.items(), ROLES, strict=True)
    ]
    wait, matched = waiting(api, request), pairs(*sides)
    if reads_pairs(pools(api.engine.inputs.pooling, kind)):
        both = [_pair(first, second) for (_, first), (_, second) in matched]
        prompts = await api.reader.of_inputs(named(second, both), body, wait=wait)
        return await pool(api, kind, body, request, prompts, task="classify")
    alone = [
        (name, ScoreInputs((value,)) if isinstance(value, ScoreInput) else value)
        for side in sides
        for name, value in side
    ]
    prompts = await api.reader.of_inputs(alone, body, wait=wait)
    job, embeddings = await pool(api, kind, body, request, prompts, task="embed")
    embedded = pairs(embeddings[: len(firsts)], embeddings[len(firsts) :])
    size = sum(embedding.outputs.data.size for embedding in embeddings)
    return job, await off_loop(size, lambda: [cosine(*pair) for pair in embedded])


def _side(text: Text, role: str, name: str, salt: str | None) -> str | ScoreInput:
    return text if isinstance(text, str) else ScoreInput.of(role, text.content, name, salt)


def _pair(first: str | ScoreInput, second: str | ScoreInput) -> tuple[str, str] | ScoreInputs:
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    both = zip(ROLES, (first, second), strict=True)
    return ScoreInputs(
        tuple(ScoreInput.of(role, side, role) if isinstance(side, str) else side for role, side in both)
    )
