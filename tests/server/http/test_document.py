"""Tests of the OpenAPI document: requests generated from it, valid or not, never break the server, and every
answer matches its schema."""

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
from quire.server.http import fast_path
from quire.server.settings import make_settings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

FEW = settings(
    max_examples=3,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


FEWER = settings(FEW, max_examples=2)
"""Settings for bodies that are mostly those of another route: generating them takes the time."""
DOORS = (
    *("^/v1/responses", "^/v1/messages$"),
    "^/(server|tokenizer)_info|^/reset_(mm|enc)|^/infer|lora",
)
OPEN = "|".join(DOORS)
"""Routes that are tested on a server with all optional features on."""
at_borders = pytest.mark.parametrize(
    "stride", [24, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
"""Send one in `stride` of the boundary cases of schemathesis (a route may have hundreds); the slow run sends
all of them."""
ALIKE = "/(de)?render|batch|^/invocations|count_tokens"
"""Routes with bodies that are mostly those of other routes: they get no boundary cases."""
STOPS = "^/(pause|resume|is_paused|abort_requests|sleep|wake_up|is_sleeping|collective_rpc|get_world_size)$"
"""Routes that stop an engine; they are tested on a separate one."""
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
"""Settings with all optional features on: parsers, stored responses, developer routes."""


@pytest.fixture(autouse=True)
def exact_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the texts of numbers and booleans: they are converted, but the document has no word of it."""
    monkeypatch.setattr(fast_path, "_MAX_CONVERTED", 0)


def document_of(engine: FakeEngine, server_settings: Any = CLOSED) -> BaseSchema:
    schema: BaseSchema = schemathesis.openapi.from_asgi(
        "/openapi.json", Application(engine, server_settings).asgi
    )
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return schema


def check(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


def check_all(schema: BaseSchema, few: settings, stride: int) -> None:
    """Run the cases as `parametrize()` does, but generate them here and not at collection. One in `stride`
    of the valid and of the invalid boundary cases is sent, so that every route gets both."""
    num_tests = 0
    for operation in get_all_tests(schema=schema, test_func=check, settings=few, given_kwargs=None):
        _, test = operation.ok()
        by_mode: dict[Any, list[Any]] = {}
        for example in getattr(test, "hypothesis_explicit_examples", []):
            case = example.kwargs.get("case")
            mode = case.meta.generation.mode if case is not None and case.meta is not None else None
            by_mode.setdefault(mode, []).append(example)
        test.hypothesis_explicit_examples = [
            example for examples in by_mode.values() for example in examples[::stride]
        ]
        test()
        num_tests += 1
    assert num_tests


plain, talker, stopped, other = (FakeEngine("Hi") for _ in range(4))
talker.operation.settings["lora"] = {"enable_lora": True}
# A cross-encoder scores and classifies, an embedding model does the rest.
scorer, embedder = (FakeEngine(pooling=facts) for facts in (CROSS_ENCODER, EMBEDDER))
writer = Writer()


@at_borders
def test_answers_match_the_document(stride: int) -> None:
    elsewhere = f"{OPEN}|{ALIKE}|audio"
    check_all(
        document_of(plain).exclude(path=list(POOLING_ROUTES)).exclude(path_regex=elsewhere), FEW, stride
    )


@pytest.fixture(scope="module")
def full_schema() -> BaseSchema:
    return document_of(talker, OPENED)


@at_borders
@pytest.mark.parametrize("doors", DOORS)
def test_answers_match_the_document_with_all_features_on(
    doors: str, stride: int, full_schema: BaseSchema
) -> None:
    check_all(full_schema.include(path_regex=doors), FEWER, stride)


@pytest.mark.parametrize(
    "borders", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_routes_with_shared_bodies_match_the_document(borders: bool) -> None:
    schema = document_of(other, OPENED)
    schema.config.phases.coverage.enabled = borders
    # Random bodies of this route take 4 s; those of the same route for chats have the same parts.
    skipped = [] if borders else ["/v1/completions/derender"]
    check_all(schema.include(path_regex=ALIKE).exclude(path=skipped), FEWER, 1)


@at_borders
def test_control_routes_match_the_document(stride: int) -> None:
    check_all(document_of(stopped, OPENED).include(path_regex=STOPS), FEWER, stride)


ROUTES = dict.fromkeys(
    route.path_format
    for route in Application(talker, OPENED).routes.routes
    if isinstance(route, APIRoute) and route.include_in_schema
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "path", [path for path in ROUTES if path not in POOLING_ROUTES and not re.search(STOPS, path)]
)
def test_many_random_requests_match_the_document(path: str, full_schema: BaseSchema) -> None:
    for operation in full_schema.include(path=path).get_all_operations():
        right, wrong = (operation.ok().as_strategy(generation_mode=mode) for mode in GenerationMode)
        settings(FEW, max_examples=300)(given(case=right | wrong)(check))()


@at_borders
def test_score_routes_match_the_document(stride: int) -> None:
    check_all(document_of(scorer).include(path_regex="^/(score|rerank|classify)$"), FEW, stride)


@at_borders
def test_embedding_routes_match_the_document(stride: int) -> None:
    check_all(document_of(embedder).include(path_regex="^/(v1/embeddings|pooling|v1/rerank)$"), FEW, stride)


@at_borders
def test_audio_routes_match_the_document(stride: int) -> None:
    check_all(document_of(writer).include(path_regex="^/v1/audio/"), FEW, stride)


def test_no_request_is_left_running() -> None:
    engines = (plain, talker, stopped, other, scorer, embedder, writer)
    assert [engine.num_in_flight for engine in engines] == [0] * len(engines)
