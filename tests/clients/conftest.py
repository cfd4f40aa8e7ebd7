"""One server on the default model for all clients: `make clients` installs them and runs this folder."""

import os
from collections.abc import Iterator

import pytest
from default_model import default_model
from serve_process import ServeProcess

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices over the network
FLAGS = ("--max-model-len", "4096", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    default_model()
    log = tmp_path_factory.mktemp("clients") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_RESPONSES_API_STORE", "1")
        started = ServeProcess(None, *FLAGS, log=log)
    with started as server:
        server.until_healthy()
        yield server
        gauges = server.metrics()
        assert gauges["num_requests_running"] == gauges["num_requests_waiting"] == 0
        server.end_cleanly()


@pytest.fixture
def url(served: ServeProcess) -> str:
    """Return the base URL of OpenAI's routes."""
    return f"{served.url}/v1"
