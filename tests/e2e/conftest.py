"""Servers for the tests of this folder: a shared one, and a function that starts others."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from preloaded import Preloaded
from serve_process import SHARED_FLAGS, ServeProcess, Start
from tiny_text import EOS, IM_END, TextModel, text_model, variant


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Return the tiny model without the length limit of its own generation config."""
    base = text_model(tmp_path_factory.getbasetemp())
    return variant(base, tmp_path_factory.mktemp("tiny"), generation_config={"eos_token_id": [EOS, IM_END]})


@pytest.fixture(scope="session")
def server(tiny: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Start the server that most tests share, since they do not change it. Its processes import their modules
    themselves."""
    log = tmp_path_factory.mktemp("shared") / "log"
    with ServeProcess(str(tiny.path), *SHARED_FLAGS, log=log) as started:
        started.until_healthy()
        yield started
        started.end_cleanly()


@pytest.fixture
def start(tiny: TextModel, tmp_path: Path, preloaded: Preloaded) -> Iterator[Start]:
    """Yield a function that starts a server with the given flags; it is killed after the test. With `fresh`,
    the server's processes import their modules themselves."""
    with ExitStack() as stack:

        def make(*flags: str, model: str = str(tiny.path), fresh: bool = False) -> ServeProcess:
            log = tmp_path / f"log{len(list(tmp_path.glob('log*')))}"
            origin = None if fresh else preloaded
            return stack.enter_context(ServeProcess(model, *SHARED_FLAGS, *flags, log=log, preloaded=origin))

        yield make
