"""Tests of /score and /rerank."""

from typing import Any

import numpy as np
import pytest
from ask import CLASSIFIER, CROSS_ENCODER, EMBEDDER, pool, refused
from fake_engine import FakeEngine, byte_tokenizer, numbers

QUERY = "who sleeps"
DOCUMENTS = ["the dog", "a page of a book", "ten", "the dog sleeps"]
SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")


def cross_score(first: str, second: str) -> float:
    return float(numbers(byte_tokenizer().encode_pair(first, second)[0], 1).item())


def cosine(first: str, second: str) -> float:
    a, b = (numbers(byte_tokenizer().encode(text), 6).astype(np.float64) for text in (first, second))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("path", SCORES)
@pytest.mark.parametrize(("facts", "score"), [(CROSS_ENCODER, cross_score), (EMBEDDER, cosine)])
def test_scores_one_to_many_and_pairwise(path: str, facts: Any, score: Any) -> None:
    engine = FakeEngine(pooling=facts)
    reply = pool(path, engine, text_1=QUERY, text_2=DOCUMENTS).json()
    expected = [score(QUERY, text) for text in DOCUMENTS]
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(expected)
    assert reply["data"][1].keys() == {"index", "object", "score"} and reply["data"][1]["index"] == 1
    count = sum(len(QUERY) + len(text) for text in DOCUMENTS)
    assert reply["id"].startswith("score-") and reply["object"] == "list"
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        both = {first: DOCUMENTS, second: DOCUMENTS[::-1]}
        scores = [entry["score"] for entry in pool(path, engine, **both).json()["data"]]
        assert scores == pytest.approx(list(map(score, DOCUMENTS, DOCUMENTS[::-1])))


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize(("facts", "score"), [(CROSS_ENCODER, cross_score), (EMBEDDER, cosine)])
def test_rerank_sorts_by_relevance(path: str, facts: Any, score: Any) -> None:
    engine = FakeEngine(pooling=facts)
    reply = pool(path, engine, query=QUERY, documents=DOCUMENTS).json()
    scores = [score(QUERY, text) for text in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -scores[index])
    assert [result["index"] for result in reply["results"]] == order
    assert [result["document"] for result in reply["results"]] == [
        {"text": DOCUMENTS[index]} for index in order
    ]
    assert [result["relevance_score"] for result in reply["results"]] == pytest.approx(sorted(scores)[::-1])
    assert reply["id"].startswith("rerank-") and reply["usage"].keys() == {"prompt_tokens", "total_tokens"}
    best = pool(path, engine, query=QUERY, documents=DOCUMENTS, top_n=2).json()
    assert best["results"] == reply["results"][:2]


def test_pairs_are_truncated_and_joined_by_templates() -> None:
    engine = FakeEngine(pooling=CROSS_ENCODER)
    pool("/rerank", engine, query="abc", documents=["d" * 20], truncate_prompt_tokens=8)
    assert engine.pooled[0][1].token_ids == byte_tokenizer().encode_pair("abc", "d" * 5)[0]
    engine.facts.chat_template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    pool("/rerank", engine, query="abc", documents=["d"])
    assert engine.pooled[1][1].text == "query=abc;document=d;"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "1:1, 1:N or N:N"),
        ("/score", {"text_1": [], "text_2": "b"}, "too_short"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": {"content": []}}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", "c" * 600]}, "text_2[1]: This model's maximum"),
        ("/rerank", {"query": "a", "documents": ["b", "c" * 600]}, "documents[1]: This model's maximum"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "greater_than_equal"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ],
)
@pytest.mark.parametrize("facts", [CROSS_ENCODER, EMBEDDER])
def test_invalid_parameters_are_400(path: str, body: dict[str, Any], words: str, facts: Any) -> None:
    assert words in refused(pool(path, FakeEngine(pooling=facts), **body))["message"]


def test_wrong_model_kind_is_refused() -> None:
    body = {"query": "a", "documents": ["b"]}
    assert "num_labels == 1" in refused(pool("/rerank", FakeEngine(pooling=CLASSIFIER), **body))["message"]
    assert "--runner pooling" in refused(pool("/rerank", FakeEngine(), **body), 404)["message"]
