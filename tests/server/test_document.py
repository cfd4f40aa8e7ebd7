"""The document is true: what is made from it, right or wrong, never breaks the server, and every answer is
as described."""

import re
from typing import Any

import pytest
import schemathesis
from ask import CROSS_ENCODER, EMBEDDER
from fake_engine import FakeEngine
from fake_speech import Writer
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from quire.config.env import Env
from quire.metrics.http import POOLING_ROUTES
from quire.server.app import Application
from quire.server.settings import make_settings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

FEW = settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


FEWER = settings(FEW, max_examples=4)
"""For bodies that are mostly those of another route: making them takes the time."""
DOORS = (
    *("^/v1/responses", "^/v1/messages|derender"),
    "^/(server|tokenizer)_info|^/reset_(mm|enc)|^/infer|lora",
)
OPEN = "|".join(DOORS)
"""Asked of a server with every door open."""
ALIKE = "/render|batch|^/invocations"
"""Routes whose bodies are mostly those of others: no cases at every border of these."""
STOPS = "^/(pause|resume|is_paused|abort_requests|sleep|wake_up|is_sleeping|collective_rpc|get_world_size)$"
"""What stops an engine has one of its own."""
CLOSED = make_settings({})
OPENED = make_settings(
    {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "enable_tokenizer_info_endpoint": True},
    env=Env.read(
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }
    ),
)
"""Every door: parsers, kept responses, the routes for developers."""


def document_of(engine: FakeEngine, asked: Any = CLOSED) -> BaseSchema:
    schema: BaseSchema = schemathesis.openapi.from_asgi("/openapi.json", Application(engine, asked).asgi)
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return schema


def check(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


def check_all(schema: BaseSchema, few: settings) -> None:
    """As `parametrize()` does, but cases are made by who runs them, not by all who collect tests."""
    tests = list(get_all_tests(schema=schema, test_func=check, settings=few, given_kwargs=None))
    assert tests
    for found in tests:
        _, test = found.ok()
        test()


plain, talker, stopped, other = (FakeEngine("Hi") for _ in range(4))
talker.operation.settings["lora"] = {"enable_lora": True}
# A cross-encoder scores and classifies, an embedding model does the rest.
scorer, embedder = (FakeEngine(pooling=facts) for facts in (CROSS_ENCODER, EMBEDDER))
writer = Writer()


def test_answers_are_as_described() -> None:
    elsewhere = f"{OPEN}|{ALIKE}|audio"
    check_all(document_of(plain).exclude(path=list(POOLING_ROUTES)).exclude(path_regex=elsewhere), FEW)


@pytest.fixture(scope="module")
def talking() -> BaseSchema:
    return document_of(talker, OPENED)


@pytest.mark.parametrize("doors", DOORS)
def test_answers_are_as_described_with_every_door_open(doors: str, talking: BaseSchema) -> None:
    check_all(talking.include(path_regex=doors), FEWER)


def test_bodies_of_other_routes_are_answered_as_described() -> None:
    schema = document_of(other, OPENED)
    schema.config.phases.coverage.enabled = False
    check_all(schema.include(path_regex=ALIKE), FEW)


def test_stops_are_as_described() -> None:
    check_all(document_of(stopped, OPENED).include(path_regex=STOPS), FEWER)


ROUTES = dict.fromkeys(
    route.path_format
    for route in Application(talker, OPENED).routes.routes
    if isinstance(route, APIRoute) and route.include_in_schema
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in ROUTES if path not in POOLING_ROUTES and not re.search(STOPS, path)]
)
def test_many_answers_are_as_described(path: str, talking: BaseSchema) -> None:
    for found in talking.include(path=path).get_all_operations():
        right, wrong = (found.ok().as_strategy(generation_mode=mode) for mode in GenerationMode)
        settings(FEW, max_examples=300)(given(case=right | wrong)(check))()


def test_scores_are_as_described() -> None:
    check_all(document_of(scorer).include(path_regex="^/(score|rerank|classify)$"), FEW)


def test_vectors_are_as_described() -> None:
    check_all(document_of(embedder).include(path_regex="^/(v1/embeddings|pooling|v1/rerank)$"), FEW)


def test_speech_is_as_described() -> None:
    check_all(document_of(writer).include(path_regex="^/v1/audio/"), FEW)


def test_nothing_is_left_running() -> None:
    engines = (plain, talker, stopped, other, scorer, embedder, writer)
    assert [each.num_in_flight for each in engines] == [0] * len(engines)
