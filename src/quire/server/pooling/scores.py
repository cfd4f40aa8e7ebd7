"""/score and /rerank: pairs of texts."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.pooling import cosine, pairs, pools, reads_pairs
from quire.server.errors import json_response
from quire.server.generate import Api, Job
from quire.server.pooling.bodies import PoolingBody, RerankBody, ScoreBody, Texts
from quire.server.pooling.jobs import Pooled, check_count, check_pooling, listing, named, pool, usage
from quire.server.prompts import off_loop


async def answer_score(api: Api, body: ScoreBody, request: Request) -> Response:
    sides = {"text_1": _listed(body.text_1), "text_2": _listed(body.text_2)}
    job, outputs = await _score(api, "score", body, request, sides)
    data = [
        {"index": index, "object": "score", "score": each.outputs.data.item()}
        for index, each in enumerate(outputs)
    ]
    return json_response(listing(api, job, data, outputs))


async def answer_rerank(api: Api, body: RerankBody, request: Request) -> Response:
    documents = _listed(body.documents)
    job, outputs = await _score(api, "rerank", body, request, {"query": [body.query], "documents": documents})
    results: list[dict[str, Any]] = [
        {"index": index, "document": {"text": text}, "relevance_score": each.outputs.data.item()}
        for index, (text, each) in enumerate(zip(documents, outputs, strict=True))
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    counted = usage(api, outputs)
    del counted["completion_tokens"]
    return json_response(
        {"id": job.id, "model": job.model, "usage": counted, "results": results[: body.top_n or None]}
    )


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def _score(
    api: Api, kind: str, body: PoolingBody, request: Request, sides: dict[str, list[str]]
) -> tuple[Job, list[Pooled]]:
    """An output of one number for each pair: a cross-encoder reads both texts at once, of an embedding model
    it is the cosine of their embeddings."""
    await check_pooling(api, body)
    (_, firsts), (second, seconds) = sides.items()
    check_count(api, max(len(firsts), len(seconds)), second)
    matched = pairs(firsts, seconds)
    if reads_pairs(pools(api.engine.inputs.pooling, kind)):
        prompts = await api.reader.of_inputs(named(second, matched), body)
        return await pool(api, kind, body, request, prompts, task="classify")
    texts = [each for name, side in sides.items() for each in named(name, side)]
    prompts = await api.reader.of_inputs(texts, body)
    job, found = await pool(api, kind, body, request, prompts, task="embed")
    both = pairs(found[: len(firsts)], found[len(firsts) :])
    size = sum(each.outputs.data.size for each in found)
    return job, await off_loop(size, lambda: [cosine(*each) for each in both])
