"""Tests of /v1/embeddings, /pooling and /classify."""

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from ask import CLASSIFIER, EMBEDDER, MESSAGES, ask, chat, complete, pool, refused
from disconnecting import post
from fake_engine import FakeEngine, numbers

from quire.server.app import Application
from quire.server.pooling.calls import pack_values
from quire.server.settings import make_settings

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["abc", "a much longer text", "de"]
IDS = [list(text.encode()) for text in TEXTS]


def embedder(**settings: Any) -> FakeEngine:
    return FakeEngine(pooling=EMBEDDER, **settings)


def ids_of(text: str) -> list[int]:
    return FakeEngine().tokenizer.encode(text)


def vectors(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize("value", [TEXTS[0], TEXTS, IDS[0], IDS])
def test_every_input_form_keeps_its_order(value: Any) -> None:
    engine = embedder()
    response = pool(EMBEDDINGS, engine, input=value)
    several = isinstance(value[0], list) or value is TEXTS
    expected = [ids_of(item) if isinstance(item, str) else item for item in (value if several else [value])]
    assert vectors(response) == [numbers(ids, 6).tolist() for ids in expected]
    reply = response.json()
    count = sum(map(len, expected))
    assert reply["id"].startswith("embd-") and reply["object"] == "list" and reply["model"] == "fake"
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    assert engine.num_in_flight == 0 and not engine.aborted


def test_conversation_is_one_input() -> None:
    engine = embedder()
    assert vectors(pool(EMBEDDINGS, engine, messages=MESSAGES)) == [numbers(ids_of("user:hi\n"), 6).tolist()]
    refused(pool(EMBEDDINGS, engine, messages=MESSAGES, chat_template="{{ 1 }}"))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "<f4"),
        ({"endianness": "big"}, ">f4"),
        ({"embed_dtype": "float16", "endianness": "little"}, "<f2"),
    ],
)
def test_base64_and_bytes_encodings(options: dict[str, str], dtype: str) -> None:
    expected = [numbers(ids, 6) for ids in IDS]
    body = {"input": IDS, **options}
    result = vectors(pool(EMBEDDINGS, embedder(), encoding_format="base64", **body))
    for text, vector in zip(result, expected, strict=True):
        assert np.array_equal(np.frombuffer(base64.b64decode(text), dtype), vector.astype(dtype))
    raw = pool(EMBEDDINGS, embedder(), encoding_format="bytes", **body)
    assert raw.headers["content-type"] == "application/octet-stream"
    for part, vector in zip(json.loads(raw.headers["metadata"])["data"], expected, strict=True):
        content = raw.content[part["start"] : part["end"]]
        assert part["shape"] == [6] and np.array_equal(np.frombuffer(content, dtype), vector.astype(dtype))
    alone = pool(EMBEDDINGS, embedder(), encoding_format="bytes_only", **body)
    assert alone.content == raw.content and "metadata" not in alone.headers


def test_bfloat16_rounds_to_even() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5], np.float32)
    assert pack_values(values, "bfloat16", "big").hex(" ", 2) == "3f80 3f80 3f82 3f81 c020"


def test_parameters_reach_the_engine() -> None:
    engine = embedder()
    body = {"input": TEXTS, "dimensions": 2, "normalize": False, "priority": 3, "request_id": "r"}
    response = pool(EMBEDDINGS, engine, cache_salt="s", truncate_prompt_tokens=2, user="u", **body)
    assert [len(vector) for vector in vectors(response)] == [2, 2, 2]
    assert [(id, params.use_activation, priority) for id, _, params, priority in engine.pooled] == [
        (f"embd-r-{index}", False, 3) for index in range(3)
    ]
    assert {prompt.cache_salt for _, prompt, _, _ in engine.pooled} == {"s"}
    assert [prompt.token_ids for _, prompt, _, _ in engine.pooled] == [ids_of(text)[:2] for text in TEXTS]
    vectors(pool(EMBEDDINGS, engine, input=IDS[1], truncate_prompt_tokens=3, truncation_side="left"))
    assert engine.pooled[-1][1].token_ids == IDS[1][-3:]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "too_short"),
        ({"input": [[]]}, "cannot be empty"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["ab", "x" * 600, "c"]}, "input[1]: This model's maximum context length"),
        ({"input": [[1], [2], [9999]]}, "input[2]: Token id 9999 is out of vocabulary"),
        ({"input": ""}, "input: The decoder prompt cannot be empty"),
        ({"input": "a", "dimensions": -1}, "dimensions must be a positive integer"),
        ({"input": "a", "dimensions": 7}, "from 1 to 6"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "cannot be empty"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "greater than max_model_len"),
        ({"input": ["a"] * 5}, "5 inputs exceed the maximum of 4 per request"),
    ],
)
def test_invalid_parameters_are_400(
    body: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.settings.MAX_SEQUENCES", 4)
    engine = embedder()
    assert words in refused(pool(EMBEDDINGS, engine, **body))["message"]
    assert not engine.pooled


def test_unknown_model_and_wrong_runner_are_404() -> None:
    refused(pool(EMBEDDINGS, embedder(), input="a", model="x"), 404)
    for path in (EMBEDDINGS, "/pooling", "/classify"):
        assert "--runner pooling" in refused(pool(path, FakeEngine(), input="a"), 404)["message"]
    for response in (chat(embedder()), complete(embedder()), chat(embedder(), stream=True)):
        assert "--runner generate" in refused(response, 404)["message"]
    assert (
        "--convert embed" in refused(pool(EMBEDDINGS, FakeEngine(pooling=CLASSIFIER), input="a"))["message"]
    )


def test_one_failed_input_aborts_the_others() -> None:
    engine = embedder(fail_after=0)
    assert refused(pool(EMBEDDINGS, engine, input=TEXTS), 500)["type"] == "InternalServerError"
    assert engine.num_in_flight == 0 and len(engine.aborted) == 3


async def test_client_disconnect_aborts_all_inputs() -> None:
    engine = embedder(step_s=60)
    application = Application(engine, make_settings({}))
    disconnect = asyncio.Event()
    task = asyncio.create_task(post(application, EMBEDDINGS, {"input": TEXTS}, disconnect))
    while engine.num_in_flight < len(TEXTS):
        await asyncio.sleep(0)
    disconnect.set()
    assert await asyncio.wait_for(task, 60) == 499
    assert len(engine.aborted) == 3 and engine.num_in_flight == 0


def test_pooling_route_serves_every_task() -> None:
    (pooled,) = pool("/pooling", embedder(), input="abc").json()["data"]
    assert pooled == {"index": 0, "object": "pooling", "data": numbers(ids_of("abc"), 6).tolist()}
    (by_token,) = pool("/pooling", embedder(), input="abc", task="token_embed").json()["data"]
    assert by_token["data"] == numbers(ids_of("abc"), 6, by_token=True).tolist()
    refused(pool("/pooling", embedder(), input="a", task="plugin"))
    refused(pool("/pooling", embedder(), input="a", task="classify"))


def test_classes_have_labels() -> None:
    response = pool("/classify", FakeEngine(pooling=CLASSIFIER), input=TEXTS)
    reply = response.json()
    assert reply["id"].startswith("classify-") and reply["usage"]["prompt_tokens"] > 0
    for index, (entry, text) in enumerate(zip(reply["data"], TEXTS, strict=True)):
        probs = numbers(ids_of(text), 3)
        label = CLASSIFIER.labels[int(probs.argmax())]
        assert entry == {"index": index, "label": label, "probs": probs.tolist(), "num_classes": 3}


def test_data_parallel_rank_and_api_key_are_checked() -> None:
    body = {"input": "a"}
    refused(ask("POST", EMBEDDINGS, engine=embedder(), json=body, headers={"x-data-parallel-rank": "1"}))
    assert ask("POST", "/rerank", engine=embedder(), json={}, settings={"api_key": ["k"]}).status_code == 401
