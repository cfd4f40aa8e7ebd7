"""/score and /rerank: pairs of texts, or of texts and media."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.pooling import cosine, pairs, pools, reads_pairs
from quire.frontend.score_inputs import ROLES, Side, Sides
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
    sides = {"text_1": _listed(body.text_1), "text_2": _listed(body.text_2)}
    job, outputs = await _score(api, "score", body, request, sides)
    data = [
        {"index": index, "object": "score", "score": each.outputs.data.item()}
        for index, each in enumerate(outputs)
    ]
    return json_response(listing(api, job, data, outputs))


async def answer_rerank(api: GenerationService, body: RerankBody, request: Request) -> Response:
    documents = _listed(body.documents)
    job, outputs = await _score(api, "rerank", body, request, {"query": [body.query], "documents": documents})
    results: list[dict[str, Any]] = [
        {"index": index, "document": _shown(document), "relevance_score": each.outputs.data.item()}
        for index, (document, each) in enumerate(zip(documents, outputs, strict=True))
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    counted = usage(api, outputs)
    del counted["completion_tokens"]
    return json_response(
        {"id": job.id, "model": job.model, "usage": counted, "results": results[: body.top_n or None]}
    )


def _listed(texts: Texts) -> list[Text]:
    return texts if isinstance(texts, list) else [texts]


def _shown(document: Text) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else {"multi_modal": document.content}


async def _score(
    api: GenerationService,
    kind: str,
    body: ScoreBody | RerankBody,
    request: Request,
    given: dict[str, list[Text]],
) -> tuple[ApiCall, list[Pooled]]:
    """An output of one number for each pair: a cross-encoder reads both at once, of an embedding model it is
    the cosine of their embeddings."""
    await check_pooling(api, body)
    (_, firsts), (second, seconds) = given.items()
    check_count(api, max(len(firsts), len(seconds)), second)
    sides = [
        [(name, _side(each, role, name, body.cache_salt)) for name, each in named(field, side)]
        for (field, side), role in zip(given.items(), ROLES, strict=True)
    ]
    wait, matched = waiting(api, request), pairs(*sides)
    if reads_pairs(pools(api.engine.inputs.pooling, kind)):
        both = [_pair(first, second) for (_, first), (_, second) in matched]
        prompts = await api.reader.of_inputs(named(second, both), body, wait=wait)
        return await pool(api, kind, body, request, prompts, task="classify")
    alone = [
        (name, Sides((each,)) if isinstance(each, Side) else each) for side in sides for name, each in side
    ]
    prompts = await api.reader.of_inputs(alone, body, wait=wait)
    job, found = await pool(api, kind, body, request, prompts, task="embed")
    closest = pairs(found[: len(firsts)], found[len(firsts) :])
    size = sum(each.outputs.data.size for each in found)
    return job, await off_loop(size, lambda: [cosine(*each) for each in closest])


def _side(given: Text, role: str, name: str, salt: str | None) -> str | Side:
    return given if isinstance(given, str) else Side.of(role, given.content, name, salt)


def _pair(first: str | Side, second: str | Side) -> tuple[str, str] | Sides:
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    both = zip(ROLES, (first, second), strict=True)
    return Sides(tuple(Side.of(role, each, role) if isinstance(each, str) else each for role, each in both))
