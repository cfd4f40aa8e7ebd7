"""Tests of environment variables with our prefixes."""

import logging
from collections.abc import Callable, Iterator

import pytest

from quire.config.env import _ENV_KINDS, NO_EFFECT, Env, warn_unknown
from quire.logs import warn_once


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    warn_once.cache_clear()
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)
    yield lambda: [record.message for record in caplog.records]
    logger.removeHandler(caplog.handler)


def test_unknown_variable_is_warned_about_once_with_the_nearest_name(
    warnings: Callable[[], list[str]],
) -> None:
    environ = {"VLLM_LOGING_LEVEL": "DEBUG", "QUIRE_XXXXXXXXX": "1", "VLLM_EMPTY": "", "HOME": "/h"}
    for _ in range(2):
        warn_unknown(environ)
    assert warnings() == [
        "unknown environment variable QUIRE_XXXXXXXXX is ignored",
        "unknown environment variable VLLM_LOGING_LEVEL is ignored; did you mean 'VLLM_LOGGING_LEVEL'?",
    ]


def test_known_variables_are_not_warned_about(warnings: Callable[[], list[str]]) -> None:
    names = [name.upper() for name in _ENV_KINDS]
    warn_unknown({f"{prefix}_{name}": "1" for prefix in ("QUIRE", "VLLM") for name in names})
    warn_unknown({"QUIRE_TEST_TRAFFIC_S": "3"})
    assert warnings() == []


def test_vllm_variables_without_effect_are_warned_about(warnings: Callable[[], list[str]]) -> None:
    """Catches a harsher warning for variables that every launch script sets."""
    names = ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", "VLLM_USE_DEEP_GEMM")
    warn_unknown(dict.fromkeys(names, "1"))
    assert warnings() == [
        "VLLM_NO_USAGE_STATS has no effect in Quire",
        "VLLM_USE_DEEP_GEMM has no effect in Quire: block FP8 always uses Quire's own kernel",
        "VLLM_WORKER_MULTIPROC_METHOD has no effect in Quire",
    ]
    assert not {f"VLLM_{name.upper()}" for name in Env.__dataclass_fields__} & NO_EFFECT
