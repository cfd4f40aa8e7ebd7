"""Tests of the JSON schemas of the public test suite on a real server with a model of random weights."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from schema_suite import KNOWN, cases, groups, validator
from serve_process import PATIENCE_S, ServeProcess
from tiny_text import EOS, VOCAB, TextModel

from quire.configure import vocabulary_of
from quire.data.params import StructuredOutputsParams
from quire.errors import RequestError
from quire.text.grammar import Grammars
from quire.text.tokenizer import load_tokenizer

NUM_AT_ONCE = 16
NUM_ANSWERS = 3
TOWARDS_THE_END = 5.0
"""Logit bias of closing tokens, since a model of random weights would otherwise generate until the limit."""


def test_no_grammar_accepts_an_invalid_instance(tiny: TextModel) -> None:
    """Known faults are excluded. Nothing is sampled: the grammar itself checks the instances."""
    tokenizer = load_tokenizer(tiny.path, "hf")
    grammars = Grammars(lambda: vocabulary_of(tokenizer, VOCAB, (EOS,)))
    compiled, wrong = 0, set()
    for group in groups():
        if not isinstance(group.schema, dict):
            continue
        constraint = StructuredOutputsParams(json=group.schema)
        try:
            grammars.compile(constraint)
        except RequestError:
            continue
        compiled += 1
        for instance, valid in group.instances:
            matcher = grammars.compile(constraint).inner
            text = json.dumps(instance, ensure_ascii=False)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            passes = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
            if passes and not valid:
                wrong.add(group.name)
    assert compiled >= 200
    assert wrong == KNOWN.keys()


def ask(client: httpx.Client, schema: Any, bias: dict[str, float], way: int) -> httpx.Response:
    """Send the schema in one of the forms that a body can have."""
    constraint: dict[str, Any] = (
        {"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": json.dumps(schema), "disable_any_whitespace": True}},
    )[way]
    body = {"messages": [{"role": "user", "content": "Answer."}], "temperature": 1.5, "n": NUM_ANSWERS}
    body |= {"max_tokens": 200, "seed": 7, "logit_bias": bias, **constraint}
    return client.post("/v1/chat/completions", json=body)


def judge(name: str, schema: Any, reply: httpx.Response) -> Counter[str]:
    """Count the results of a schema's answers; an invalid answer fails here."""
    if reply.status_code == 400:
        assert reply.json()["error"]["message"], name
        return Counter(refused=1)
    assert reply.status_code == 200, f"{name}: {reply.text}"
    result: Counter[str] = Counter()
    for choice in reply.json()["choices"]:
        text, reason = choice["message"]["content"], choice["finish_reason"]
        assert reason in ("stop", "length"), f"{name}: {reason}: {text!r}"
        result["cut" if reason == "length" else validate(name, schema, text)] += 1
    return result


def validate(name: str, schema: Any, text: str) -> str:
    try:
        wrong = next(validator(schema).iter_errors(json.loads(text)), None)
    except re.error:  # jsonschema leaves patterns to Python, which has no \p{...}
        return "unjudged"
    assert wrong is None, f"{name}: {text!r}: {wrong.message}"
    return "validated"


def ask_all(server: ServeProcess, tiny: TextModel, schemas: dict[str, Any]) -> Counter[str]:
    tokenizer = load_tokenizer(tiny.path, "hf")
    ends = [EOS, *(tokenizer.encode(text, add_special_tokens=False)[0] for text in '"]}')]
    bias = {str(token_id): TOWARDS_THE_END for token_id in ends}
    with (
        httpx.Client(base_url=server.url, timeout=2 * PATIENCE_S) as client,
        ThreadPoolExecutor(NUM_AT_ONCE) as threads,
    ):
        replies = [
            threads.submit(ask, client, schema, bias, number % 3)
            for number, schema in enumerate(schemas.values())
        ]
        counts: Counter[str] = Counter()
        for (name, schema), reply in zip(schemas.items(), replies, strict=True):
            counts += judge(name, schema, reply.result())
    assert server.health() == 200
    gauges = server.metrics()
    assert gauges["num_requests_running"] == gauges["num_requests_waiting"] == 0
    print(f"{len(schemas)} schemas: {dict(counts)}")
    return counts


def test_some_schemas_over_http(server: ServeProcess, tiny: TextModel) -> None:
    every = list(cases().items())
    counts = ask_all(server, tiny, dict(every[:: len(every) // 60]))
    assert counts["refused"] >= 10
    assert counts["validated"] >= 3 * counts["cut"]


@pytest.mark.slow
def test_all_schemas_over_http(server: ServeProcess, tiny: TextModel) -> None:
    every = cases()
    counts = ask_all(server, tiny, every)
    assert len(every) - counts["refused"] >= 500
    assert counts["validated"] >= 3 * counts["cut"]


def test_grammar_without_an_end_is_a_client_error(server: ServeProcess) -> None:
    """Catches a schema that compiles, has no valid answer, and is reported as a failure of the engine."""
    endless = {
        "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}
    }
    schema = endless | {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}
    dead = r'start: "a" (/b/ & /c/)'
    for constraint in ({"json": schema}, {"grammar": dead}):
        reply = complete(server, constraint)
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert server.health() == 200


def test_schema_may_have_numbers_of_any_size(server: ServeProcess) -> None:
    """Catches integers that are too large for a message to the engine."""
    reply = complete(server, {"json": {"type": "integer", "minimum": 0, "maximum": 10**20}})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length" or 0 <= int(choice["text"]) <= 10**20


def complete(server: ServeProcess, constraint: dict[str, Any]) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 60, "structured_outputs": constraint}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
