"""Tests that the HTTP routes of pooling models match `LLM`, also through the official client."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from tiny_text import TextModel, open_text, text_model

from quire.configure import configure
from quire.entrypoints.child_cores import private_engine
from quire.server.app import Application
from quire.server.settings import make_settings

TEXTS = ["the quick fox", "a page is a block of a book", "ten", "café"]
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 400}
RERANKER = {
    "architectures": ["LlamaForSequenceClassification"],
    "classifier_from_token": ["A", "B"],
    "is_original_qwen3_reranker": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@asynccontextmanager
async def client_of(model: TextModel, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with private_engine(configure({"model": str(model.path), **SETTINGS, **settings})) as engine:
        transport = httpx.ASGITransport(Application(engine, make_settings({})).asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1", timeout=60) as client:
            yield client


def test_embeddings_match_llm(tiny: TextModel) -> None:
    settings: dict[str, Any] = {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}}
    llm = open_text(tiny, **settings)
    tokenizer = llm.get_tokenizer()
    wanted = np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    ids = [tokenizer.encode(text) for text in TEXTS]

    async def go() -> None:
        async with client_of(tiny, **settings) as http:
            openai = AsyncOpenAI(base_url=http.base_url, api_key="none", http_client=http, max_retries=0)
            make = functools.partial(openai.embeddings.create, model=str(tiny.path))
            for inputs in (TEXTS, ids):
                reply = await make(input=inputs)  # the client requests base64 and decodes it
                assert np.abs(np.array([output.embedding for output in reply.data]) - wanted).max() < 1e-6
                reply = await make(input=inputs, encoding_format="float")
                assert np.abs(np.array([output.embedding for output in reply.data]) - wanted).max() < 1e-6
            assert reply.usage.prompt_tokens == sum(map(len, ids))
            short = await make(input=TEXTS[0], dimensions=4)
            cut = wanted[0, :4] / np.linalg.norm(wanted[0, :4])
            assert np.abs(np.array(short.data[0].embedding) - cut).max() < 1e-5
            many = await make(input=TEXTS * 100)
            assert np.abs(np.array([e.embedding for e in many.data]) - np.tile(wanted, (100, 1))).max() < 1e-5
            scores = (await http.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS})).json()["data"]
            assert np.abs([output["score"] for output in scores] - wanted @ wanted[0]).max() < 1e-5
            refused = await http.post("/completions", json={"prompt": "a"})
            assert refused.status_code == 404

    asyncio.run(go())


def test_rerank_matches_llm_score(tiny: TextModel) -> None:
    llm = open_text(tiny, hf_overrides=RERANKER)
    wanted = [item.outputs.score for item in llm.score("the dog", TEXTS, use_tqdm=False)]

    async def go() -> None:
        async with client_of(tiny, hf_overrides=RERANKER) as http:
            reply = (await http.post("/rerank", json={"query": "the dog", "documents": TEXTS})).json()
            actual = {item["index"]: item["relevance_score"] for item in reply["results"]}
            assert list(actual.values()) == sorted(actual.values(), reverse=True)
            assert [actual[place] for place in range(len(TEXTS))] == pytest.approx(wanted, abs=1e-6)
            classes = (await http.post("http://test/classify", json={"input": TEXTS})).json()["data"]
            probs = [item.outputs.probs for item in llm.classify(TEXTS, use_tqdm=False)]
            assert np.abs(np.array([item["probs"] for item in classes]) - probs).max() < 1e-6

    asyncio.run(go())
