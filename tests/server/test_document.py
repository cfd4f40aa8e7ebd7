"""The document is true: what is made from it, right or wrong, never breaks the server, and every answer is
as described."""

import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

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


@schema.parametrize()
@settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


def test_nothing_is_left_running() -> None:
    assert engine.num_in_flight == 0
