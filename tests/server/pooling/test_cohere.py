"""Tests of /v2/embed (Cohere)."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ask import CLASSIFIER, EMBEDDER, pool, refused
from fake_engine import FakeEngine, byte_tokenizer, numbers

TEXTS = ["the dog", "a page"]
EIGHT = replace(EMBEDDER, size=8, instructions=(("search_query", "query: "), ("clustering", "")))


def embed(engine: FakeEngine | None = None, **body: Any) -> Any:
    return pool("/v2/embed", engine or FakeEngine(pooling=EIGHT), **({"texts": TEXTS} | body))


def test_every_embedding_type() -> None:
    reply = embed(embedding_types=["float", "base64", "binary", "ubinary"]).json()
    expected = [numbers(byte_tokenizer().encode(text), 8) for text in TEXTS]
    embeddings = reply["embeddings"]
    np.testing.assert_allclose(embeddings["float"], expected, rtol=1e-6)
    for text, values in zip(embeddings["base64"], expected, strict=True):
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), values, rtol=1e-6)
    bits = [[int("".join("1" if x >= 0 else "0" for x in values), 2)] for values in expected]
    assert embeddings["ubinary"] == bits and embeddings["binary"] == [[x - 128] for (x,) in bits]
    count = sum(map(len, TEXTS))
    assert reply["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": count, "image_tokens": 0},
    }
    assert reply["texts"] == TEXTS and reply["response_type"] == "embeddings_by_type"
    assert embed().json()["embeddings"].keys() == {"float"}


def test_inputs_truncation_and_input_type() -> None:
    engine = FakeEngine(pooling=EIGHT)
    parts = [{"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]}]
    assert "texts" not in embed(engine, texts=None, inputs=parts).json()
    embed(engine, texts=["abcdef"], max_tokens=3)
    embed(engine, texts=["abcdef"], max_tokens=3, truncate="START")
    embed(engine, texts=["abc"], input_type="search_query")
    read = [prompt.token_ids for _, prompt, *_ in engine.pooled]
    expected = ["user:ab\ncd\n", "abc", "def", "query: abc"]  # the parts are one message
    assert read == [byte_tokenizer().encode(text) for text in expected]
    assert engine.inputs.tokenizer is not None
    engine.inputs.tokenizer.chat_template = None
    embed(engine, texts=None, inputs=parts, input_type="search_query")
    assert engine.pooled[-1][1].token_ids == byte_tokenizer().encode("query: abcd")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"inputs": [{"content": [{"type": "text", "text": "a"}]}]},
            "Exactly one of texts, images, or inputs",
        ),
        ({"texts": None}, "Exactly one of texts, images, or inputs"),
        ({"texts": None, "images": ["data:image/png;base64,AA"]}, "images: This model is not a multimodal"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "requires image_url"),
        ({"texts": None, "inputs": [{"content": [{"type": "text"}]}]}, "requires text"),
        (
            {"input_type": "search"},
            "Unsupported input_type 'search'. Supported values: clustering, search_query",
        ),
        ({"max_tokens": 3, "truncate": "NONE"}, "Input of 7 tokens exceeds max_tokens=3 with truncate=NONE"),
        ({"embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": []}, "too_short"),
    ],
)
def test_invalid_parameters_are_400(wrong: dict[str, Any], words: str) -> None:
    assert words in refused(embed(**wrong))["message"]


def test_models_without_the_requested_embedding_are_refused() -> None:
    assert "does not define any" in refused(embed(FakeEngine(pooling=EMBEDDER), input_type="x"))["message"]
    six = refused(embed(FakeEngine(pooling=EMBEDDER), embedding_types=["binary"]))["message"]
    assert "multiple of 8" in six
    refused(embed(FakeEngine(pooling=CLASSIFIER)))
    refused(embed(FakeEngine()), 404)
