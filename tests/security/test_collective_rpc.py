"""Worker calls over HTTP: /collective_rpc runs a method that the client names on every worker; vLLM's
security guide warns about it. Quire has the route in developer mode only, requires the key, and calls only
public methods that the engine does not need for itself."""

import pytest
from ask import ask
from fake_engine import FakeEngine
from oracle import make_tiny
from tiny import open_tiny

from quire import LLM, SamplingParams
from quire.errors import RequestError

BODY = {"method": "check_health"}
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}


def test_route_exists_in_developer_mode_only() -> None:
    engine = FakeEngine()
    for settings in ({}, {"tokens_only": True}):
        reply = ask("POST", "/collective_rpc", engine=engine, settings=settings, json=BODY)
        assert reply.status_code == 404
    assert ask("POST", "/collective_rpc", engine=engine, env=DEVELOPER, json=BODY).status_code == 200
    assert len(engine.operation.calls) == 1


def test_developer_mode_needs_the_api_key() -> None:
    engine = FakeEngine()
    settings = {"api_key": ["secret"]}
    reply = ask("POST", "/collective_rpc", engine=engine, settings=settings, env=DEVELOPER, json=BODY)
    assert reply.status_code == 401 and not engine.operation.calls


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return open_tiny(make_tiny("llama", tmp_path_factory.mktemp("rpc"))[0], max_model_len=64)


@pytest.mark.parametrize(
    "method",
    [
        *("__init__", "__class__", "__reduce__", "__setattr__", "_load", "_cache_size", "config", "nope"),
        *("close", "sleep", "load", "submit", "fetch_adapter", "profile"),
        *("check_health.__globals__", "os.system", "", "exec"),
    ],
)
def test_only_public_methods_are_called(llm: LLM, method: str) -> None:
    with pytest.raises(RequestError, match="the worker has no method|is called by the engine alone"):
        llm.collective_rpc(method)
    (answer,) = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 1, "the engine answers the next request"
