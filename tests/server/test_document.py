"""The document is true: what is made from it, right or wrong, never breaks the server, and every answer is
as described."""

import pytest
import schemathesis
from ask import CROSS_ENCODER, EMBEDDER
from fake_engine import FakeEngine
from fake_speech import Writer
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
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

engine = FakeEngine("Hi")
schema = schemathesis.openapi.from_asgi("/openapi.json", Application(engine, make_settings({})).asgi)
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])

FEW = settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


FEWER = settings(FEW, max_examples=4)
"""For bodies that are mostly those of another route: making them takes the time."""
OPEN = "^/v1/(responses|messages)|^/(server|tokenizer)_info|^/reset_(mm|enc)|^/infer|lora|derender"
"""Asked of a server with every door open."""
ALIKE = "/render|batch|^/invocations"
"""Routes whose bodies are mostly those of others: no cases at every border of these."""


@schema.exclude(path=list(POOLING_ROUTES)).exclude(path_regex=f"{OPEN}|{ALIKE}|audio").parametrize()
@FEW
def test_answers_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


# With every door open: parsers, kept responses, the routes for developers; what stops an engine has its own.
opened = make_settings(
    {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "enable_tokenizer_info_endpoint": True},
    env=Env.read(
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }
    ),
)
talker, stopped, other = FakeEngine("Hi"), FakeEngine("Hi"), FakeEngine("Hi")
talker.operation.settings["lora"] = {"enable_lora": True}
talking, stopping, alike = (
    schemathesis.openapi.from_asgi("/openapi.json", Application(each, opened).asgi)
    for each in (talker, stopped, other)
)
alike.config.phases.coverage.enabled = False
for each in (talking, stopping, alike):
    each.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
STOPS = "^/(pause|resume|is_paused|abort_requests|sleep|wake_up|is_sleeping|collective_rpc|get_world_size)$"


@talking.include(path_regex=OPEN).parametrize()
@FEWER
def test_answers_are_as_described_with_every_door_open(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


@alike.include(path_regex=ALIKE).parametrize()
@FEW
def test_bodies_of_other_routes_are_answered_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


@stopping.include(path_regex=STOPS).parametrize()
@FEWER
def test_stops_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


OPERATIONS = [
    found.ok()
    for found in talking.exclude(path=list(POOLING_ROUTES)).exclude(path_regex=STOPS).get_all_operations()
]


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_many_answers_are_as_described(operation: APIOperation) -> None:
    """Cases are made here: `parametrize()` makes them while tests are collected, also of those left out."""
    right, wrong = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @settings(FEW, max_examples=300)
    @given(case=right | wrong)
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


# A cross-encoder scores and classifies, an embedding model does the rest.
scorer, embedder = (FakeEngine(pooling=facts) for facts in (CROSS_ENCODER, EMBEDDER))
scoring, embedding = (
    schemathesis.openapi.from_asgi("/openapi.json", Application(each, make_settings({})).asgi)
    for each in (scorer, embedder)
)
for each in (scoring, embedding):
    each.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@scoring.include(path_regex="^/(score|rerank|classify)$").parametrize()
@FEW
def test_scores_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


@embedding.include(path_regex="^/(v1/embeddings|pooling|v1/rerank)$").parametrize()
@FEW
def test_vectors_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


writer = Writer()
writing = schemathesis.openapi.from_asgi("/openapi.json", Application(writer, make_settings({})).asgi)
writing.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@writing.include(path_regex="^/v1/audio/").parametrize()
@FEW
def test_speech_is_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


def test_nothing_is_left_running() -> None:
    engines = (engine, talker, stopped, other, scorer, embedder, writer)
    assert [each.num_in_flight for each in engines] == [0] * len(engines)
