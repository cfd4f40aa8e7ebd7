"""No field that a client sends can add a line to the log or colour it. This is log injection (CWE-117), of
which vLLM has no advisory."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from ask import CHAT, MESSAGES, ask, chat, refused
from fake_engine import FakeEngine

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.logs import printable, warn_once
from quire.sched.grammar import Constraints
from quire.sched.preemption import PreemptionWarning

FORGED = "x\nERROR 01-01 00:00:00 [engine.py:1] forged \x1b[31m"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Return the logged messages, as they would be written, without tracebacks."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("quire")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize(
    "body",
    [
        {"request_id": FORGED},
        {"model": FORGED},
        {FORGED: 1},
        {"messages": [{"role": "user", "content": FORGED}], "stop": [FORGED], "bad_words": [FORGED]},
        {"user": FORGED, "cache_salt": FORGED, "session_id": FORGED},
        {"structured_outputs": {"grammar": FORGED}},
        {"structured_outputs": {"choice": [FORGED]}, "vllm_xargs": {FORGED: FORGED}},
        {"functions": [{"name": FORGED}]},
        {"best_of": 7, "chat_template_kwargs": {FORGED: FORGED}},
    ],
    ids=lambda body: next(iter(body)) if FORGED not in body else "field",
)
def test_body_fields_cannot_inject_log_lines(lines: list[str], body: dict[str, Any]) -> None:
    settings = {"enable_log_requests": True, "enable_log_outputs": True, "log_error_stack": True}
    chat(settings=settings, **body)
    assert all(line.isprintable() for line in lines), lines


def test_headers_cannot_inject_log_lines(lines: list[str]) -> None:
    headers = [(b"x-request-id", "a\x85b\x9b31m".encode("latin-1"))]
    body = {"messages": MESSAGES}
    response = ask("POST", CHAT, settings={"enable_log_requests": True}, json=body, headers=headers)
    assert refused(response)["param"] == "request_id"
    assert all(line.isprintable() for line in lines), lines


def test_unknown_model_is_reported_on_one_line() -> None:
    """The message is also logged with --log-error-stack."""
    error = refused(chat(model=FORGED), 404)
    assert error["message"].isprintable() and "forged" in error["message"]
    assert len(refused(chat(model="x" * 10**6), 404)["message"]) < 1000
    assert refused(chat(model="żółw/2"), 404)["message"].startswith("The model `żółw/2` does not exist.")


def test_ids_of_python_callers_are_logged_on_one_line(lines: list[str]) -> None:
    """Request ids of Python callers are not checked like those of HTTP clients."""
    PreemptionWarning()(FORGED, 1)
    assert all(line.isprintable() for line in lines) and "forged" in lines[0]

    class Failing:
        def begin(self, request: Any) -> Future[Any]:
            failed: Future[Any] = Future()
            failed.set_exception(ValueError(FORGED))
            return failed

    constraints = Constraints(Failing())  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs={"regex": "a"})
    constraints.add(Request(id=FORGED, tokens=[1], params=params, prompt_len=1, limit=9, seed=0))
    assert constraints.settle() == {FORGED: None}
    assert len(lines) == 2 and all(line.isprintable() for line in lines)


def test_deprecated_function_fields_are_ignored_with_one_warning(lines: list[str]) -> None:
    warn_once.cache_clear()
    engine = FakeEngine()
    for _ in range(3):
        assert chat(engine, functions=[{"name": "f"}], function_call={"name": "f"}).status_code == 200
    assert chat(engine, function_call="none").status_code == 200
    assert len([line for line in lines if "`functions`" in line]) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\nb\x1b", "a\\nb\\x1b"),
        ("ż", "ż"),
        ("\u2028", "\\u2028"),
        ("x" * 300, "x" * 256 + "..."),
    ],
)
def test_printable_escapes_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown
