"""Tests of /generative_scoring."""

import math
from typing import Any

import pytest
from ask import EMBEDDER, ask, refused
from fake_engine import FakeEngine, byte_tokenizer

BODY: dict[str, Any] = {"query": "is it? ", "items": ["an apple", "no"], "label_token_ids": [3, 90, 7]}


def score(engine: FakeEngine | None = None, **fields: Any) -> Any:
    return ask("POST", "/generative_scoring", engine=engine, json=BODY | fields)


def probability(id: int) -> float:
    return math.exp(-0.01 * (id + 1))


def test_score_of_the_first_label() -> None:
    engine = FakeEngine()
    reply = score(engine).json()
    assert reply["id"].startswith("generative-scoring-") and reply["object"] == "list"
    assert reply.keys() == {"id", "object", "created", "model", "data", "usage"}
    expected = probability(3) / (probability(3) + probability(90) + probability(7))
    assert [entry.pop("score") for entry in reply["data"]] == pytest.approx([expected, expected])
    assert reply["data"] == [{"index": index, "object": "score"} for index in (0, 1)]
    count = sum(len(BODY["query"]) + len(item) for item in BODY["items"])
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count + 2, "completion_tokens": 2}
    prompts = [prompt.token_ids for _, prompt, *_ in engine.seen]
    assert prompts == [byte_tokenizer().encode(BODY["query"] + item) for item in BODY["items"]]
    alone = score(apply_softmax=False, label_token_ids=[90, 90]).json()
    assert alone["data"][0]["score"] == pytest.approx(probability(90))
    twice = score(label_token_ids=[90, 90]).json()
    assert twice["data"][0]["score"] == pytest.approx(1.0)


def test_token_ids_item_first_and_truncation() -> None:
    engine = FakeEngine()
    score(engine, query=[1, 2], items=[[3], [4, 5]], item_first=True)
    assert [prompt.token_ids for _, prompt, *_ in engine.seen] == [[3, 1, 2], [4, 5, 1, 2]]
    engine = FakeEngine()
    max_len = engine.inputs.max_model_len
    assert score(engine, items=["x" * 2 * max_len]).status_code == 200
    assert len(engine.seen[0][1].token_ids) == max_len - 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"label_token_ids": [3, 10**6]}, "label_token_id 1000000 is out of vocabulary range [0, "),
        ({"label_token_ids": []}, "too_short"),
        ({"items": []}, "too_short"),
        ({"items": ["a"] * 1025}, "1025 items exceed the maximum of 1024 per request"),
        ({"items": ["a", [1]]}, "items"),
        ({"query": [10**6]}, "1000000"),
        ({"query": "", "items": [""]}, "empty"),
        ({"lora_request": {"a": 1}}, "`lora_request` is not supported"),
    ],
)
def test_invalid_scoring_requests_are_refused(wrong: dict[str, Any], words: str) -> None:
    assert words in refused(score(**wrong))["message"]


def test_pooling_and_unknown_models_are_404() -> None:
    refused(score(FakeEngine(pooling=EMBEDDER)), 404)
    refused(score(model="another"), 404)
