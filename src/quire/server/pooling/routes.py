"""The routes of pooling models."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.server.http.document import BODY, CODES, replies_of
from quire.server.openai.service import GenerationService
from quire.server.pooling.bodies import (
    ClassifyReply,
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
)
from quire.server.pooling.cohere import CohereBody, CohereReply, answer_cohere
from quire.server.pooling.embeddings import answer_classify, answer_embeddings, answer_pooling
from quire.server.pooling.scores import answer_rerank, answer_score


def add_pooling_routes(app: FastAPI, api: GenerationService) -> None:
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    async def create_embeddings(body: EmbeddingInput | EmbeddingChatBody, request: Request) -> Response:
        """Compute an embedding for each input."""
        return await answer_embeddings(api, body, request)

    async def create_pooling(body: PoolingInputBody | PoolingChatRequest, request: Request) -> Response:
        """Run the model's pooling task, or compute vectors or classes of every token."""
        return await answer_pooling(api, body, request)

    async def create_classes(body: InputBody | PoolingChatBody, request: Request) -> Response:
        """Compute the class probabilities of each input."""
        return await answer_classify(api, body, request)

    async def create_score(body: ScoreBody, request: Request) -> Response:
        """Score the similarity of texts, one to one or one to many."""
        return await answer_score(api, body, request)

    async def create_rerank(body: RerankBody, request: Request) -> Response:
        """Order documents by their relevance to a query."""
        return await answer_rerank(api, body, request)

    async def create_cohere_embeddings(body: CohereBody, request: Request) -> Response:
        """Compute an embedding for each input, in the format of Cohere's API."""
        return await answer_cohere(api, body, request)

    for answer, reply, *places in (
        (create_embeddings, EmbeddingReply, "/v1/embeddings"),
        (create_cohere_embeddings, CohereReply, "/v2/embed"),
        (create_pooling, PoolingReply, "/pooling"),
        (create_classes, ClassifyReply, "/classify"),
        (create_score, ScoreReply, "/score", "/v1/score"),
        (create_rerank, RerankReply, "/rerank", "/v1/rerank", "/v2/rerank"),
    ):
        described = replies_of(reply, *CODES)
        if reply in (EmbeddingReply, PoolingReply):
            described["responses"][200]["content"] = octets
        for place in places:
            app.add_api_route(place, answer, methods=["POST"], **described, **BODY)
