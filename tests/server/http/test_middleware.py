"""Tests of custom middleware, fingerprints and log configuration, all checked at startup."""

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

from quire.config.server_sections import LogSection
from quire.errors import ConfigError
from quire.server.http.log_config import apply_log_config, read_log_config
from quire.server.main import _configure_logs
from quire.server.settings import make_settings, server_settings


class Stamp:
    """Middleware that appends to a header."""

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
def importable_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a module under an import path."""
    module = ModuleType("quire_test_middleware")
    module.Stamp, module.guard, module.plain = Stamp, guard, len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


STAMP, GUARD = "quire_test_middleware.Stamp", "quire_test_middleware.guard"


def test_class_and_function_middleware_wrap_every_request() -> None:
    """The last one is outermost; streams pass both; a request that one refuses does not reach the server."""
    both = {"middleware": (GUARD, STAMP)}
    assert ask("GET", "/health", settings=both).headers.get_list("x-by") == ["function", "functionclass"]
    streamed = chat(settings=both, stream=True)
    assert streamed.headers.get_list("x-by") == ["function", "functionclass"]
    assert events(streamed) and "x-by" not in chat().headers
    refused = ask("POST", "/v1/completions", settings={"middleware": (GUARD,)}, headers={"x-teapot": "1"})
    assert refused.status_code == 418 and refused.text == "short and stout"


def test_middleware_flag_is_repeatable() -> None:
    flags = ("--middleware", GUARD, "--middleware", STAMP, "--fingerprint-mode", "none")
    assert server_settings(read(*flags)).access.middleware == (GUARD, STAMP)


@pytest.mark.parametrize(
    ("settings", "words"),
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
def test_invalid_middleware_is_refused_at_startup(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings(settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "quire-1.2.3-"),
        ({"fingerprint_mode": "custom", "fingerprint_value": "mine"}, "mine"),
        ({"fingerprint_mode": "none"}, None),
    ],
)
def test_fingerprint_mode_sets_the_fingerprint(settings: dict[str, Any], expected: str | None) -> None:
    fingerprint = chat(settings=settings).json()["system_fingerprint"]
    assert fingerprint is expected is None or fingerprint.startswith(expected)
    assert events(chat(settings=settings, stream=True))[-1]["system_fingerprint"] == fingerprint


def test_hash_mode_is_the_end_of_the_full_fingerprint() -> None:
    fingerprint = chat(settings={"fingerprint_mode": "hash"}).json()["system_fingerprint"]
    assert len(fingerprint) == 8 and chat().json()["system_fingerprint"].endswith(f"-{fingerprint}")


# ---- the log


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """Restore the loggers after the test."""
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
def test_log_config_file_is_applied(tmp_path: Path, name: str, restored_loggers: None) -> None:
    file, out = tmp_path / "log.json", tmp_path / "out"
    config(file, out, name)
    settings = make_settings({"log_config_file": str(file)})
    _configure_logs(settings.log)
    logging.getLogger("quire.server.main").info("ours")
    logging.getLogger("uvicorn.access").info("theirs")
    logging.getLogger("quire.server.main").debug("nobody's")
    assert out.read_text().split() == ["quire.server.main|ours", "uvicorn.access|theirs"]


def test_invalid_log_config_file_is_refused(tmp_path: Path, restored_loggers: None) -> None:
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
