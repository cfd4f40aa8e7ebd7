"""What a deployer puts around the server, and what it logs: named at the start, checked there."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ask import ask, chat, events
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from test_settings import read

from quire.errors import ConfigError
from quire.server.http.log_config import apply_log_config, read_log_config
from quire.server.main import _configure_logs
from quire.server.settings import LogSection, make_settings, server_settings


class Stamp:
    """Adds a header, and what was there before it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                before = b",".join(value for name, value in message["headers"] if name == b"x-by")
                message["headers"] = [*message["headers"], (b"x-by", before + b"class")]
            await send(message)

        await self.app(scope, receive, stamped)


async def guard(request: Request, call_next: Any) -> Response:
    if request.headers.get("x-teapot"):
        return PlainTextResponse("short and stout", 418)
    response: Response = await call_next(request)
    response.headers["x-by"] = "function"
    return response


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that can be imported by its name."""
    module = ModuleType("quire_test_middleware")
    module.Stamp, module.guard, module.plain = Stamp, guard, len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


STAMP, GUARD = "quire_test_middleware.Stamp", "quire_test_middleware.guard"


def test_a_class_and_a_function_stand_around_every_request() -> None:
    """The last one outermost; streams go through both; who is turned away by one never comes in."""
    both = {"middleware": (GUARD, STAMP)}
    assert ask("GET", "/health", settings=both).headers.get_list("x-by") == ["function", "functionclass"]
    streamed = chat(settings=both, stream=True)
    assert streamed.headers.get_list("x-by") == ["function", "functionclass"]
    assert events(streamed) and "x-by" not in chat().headers
    refused = ask("POST", "/v1/completions", settings={"middleware": (GUARD,)}, headers={"x-teapot": "1"})
    assert refused.status_code == 418 and refused.text == "short and stout"


def test_the_flag_may_be_repeated() -> None:
    flags = ("--middleware", GUARD, "--middleware", STAMP, "--fingerprint-mode", "none")
    assert server_settings(read(*flags)).access.middleware == (GUARD, STAMP)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"middleware": ("Stamp",)}, "not an import path"),
        ({"middleware": ("quire_nobody.Stamp",)}, "cannot be imported: ModuleNotFoundError"),
        ({"middleware": ("quire_test_middleware.nothing",)}, "cannot be imported: AttributeError"),
        ({"middleware": ("quire_test_middleware.plain",)}, "must be a class, or an async function"),
        ({"fingerprint_mode": "custom"}, "fingerprint_value goes with"),
        ({"fingerprint_value": "a"}, "fingerprint_value goes with"),
        ({"log_config_file": "/nowhere/log.json"}, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_used_is_told_at_the_start(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "quire-1.2.3-"),
        ({"fingerprint_mode": "custom", "fingerprint_value": "mine"}, "mine"),
        ({"fingerprint_mode": "none"}, None),
    ],
)
def test_the_fingerprint_tells_what_it_is_told_to(given: dict[str, Any], expected: str | None) -> None:
    found = chat(settings=given).json()["system_fingerprint"]
    assert found is expected is None or found.startswith(expected)
    assert events(chat(settings=given, stream=True))[-1]["system_fingerprint"] == found


def test_the_hash_is_the_end_of_the_whole_fingerprint() -> None:
    found = chat(settings={"fingerprint_mode": "hash"}).json()["system_fingerprint"]
    assert len(found) == 8 and chat().json()["system_fingerprint"].endswith(f"-{found}")


# ---- the log


@pytest.fixture
def restored() -> Iterator[None]:
    """Loggers as they were."""
    names = ("quire", "vllm", "uvicorn.error", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def config(file: Path, out: Path, name: str) -> dict[str, Any]:
    made = {
        "version": 1,
        "formatters": {"bare": {"format": "%(name)s|%(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(out), "formatter": "bare"}},
        "loggers": {
            name: {"handlers": ["file"], "level": "INFO", "propagate": False},
            "uvicorn.access": {"handlers": ["file"], "level": "INFO", "propagate": False},
        },
    }
    file.write_text(json.dumps(made))
    return made


@pytest.mark.parametrize("name", ["quire", "vllm"])
def test_a_file_says_where_lines_go(tmp_path: Path, name: str, restored: None) -> None:
    file, out = tmp_path / "log.json", tmp_path / "out"
    config(file, out, name)
    settings = make_settings({"log_config_file": str(file)})
    _configure_logs(settings.log)
    logging.getLogger("quire.server.main").info("ours")
    logging.getLogger("uvicorn.access").info("theirs")
    logging.getLogger("quire.server.main").debug("nobody's")
    assert out.read_text().split() == ["quire.server.main|ours", "uvicorn.access|theirs"]


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, restored: None) -> None:
    file = tmp_path / "log.json"
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="must be a JSON object"):
            make_settings({"log_config_file": str(file)})
    file.write_text(json.dumps({"version": 1, "handlers": {"a": {"class": "no.such.Handler"}}}))
    with pytest.raises(ConfigError, match="cannot be used: Unable to configure handler 'a'"):
        apply_log_config(str(file))
    file.write_text(json.dumps({"version": 1, "loggers": {"vllm": {"level": 1}, "quire": {"level": 2}}}))
    assert read_log_config(str(file))["loggers"]["quire"] == {"level": 2}
    assert LogSection().log_config_file is None
