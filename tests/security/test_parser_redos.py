"""Catastrophic backtracking in output parsers (CVE-2025-48887): a few dozen characters of model output kept
the regular expression of the pythonic parser busy for years, and the event loop with it. Quire's parsers
scan the text once; none of their patterns nests repetitions."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from re import _parser as sre  # type: ignore[attr-defined]
from typing import Any

import pytest
from ask import chat
from fake_engine import FakeEngine

import quire.server
import quire.text
from quire.text.parsers import REASONING, TOOLS, answer_parser, pythonic

PYTHONIC = "[A(A=" + "\t)A(A=,\t" * 40
"""The attack of the advisory; each repetition doubled the time."""
HOSTILE = [
    PYTHONIC,
    "[" + "A(A=A, " * 40,
    "<think>" * 200,
    "<tool_call>" * 200,
    "<tool_call>\n<function=f>\n" + "<parameter=a>\n" * 100,
    '<tool_call>{"name": "' + "\\" * 300,
    "<|tool_calls_section_begin|>" + "<|tool_call_begin|>functions.a:" * 50,
    "<|channel|>analysis<|message|>" * 50 + "to=" * 100,
    "[TOOL_CALLS]" * 100 + "[{" * 200,
    " \n\t" * 500 + "<",
]


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Yield all compiled patterns, with their names, of the modules that parse texts of clients or models."""
    for package in (quire.text, quire.server):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, re.Pattern):
                    yield f"{module.name}.{name}", value


def repeats_repetitions(parsed: Any, inside: bool = False) -> bool:
    """Return whether a parsed pattern has an unbounded repetition within another."""
    if isinstance(parsed, tuple) and len(parsed) == 3 and isinstance(parsed[2], sre.SubPattern):
        endless = parsed[1] is sre.MAXREPEAT
        return (inside and endless) or repeats_repetitions(parsed[2], inside or endless)
    if isinstance(parsed, list | tuple | sre.SubPattern):
        return any(repeats_repetitions(part, inside) for part in parsed)
    return False


def test_no_pattern_nests_repetitions() -> None:
    assert repeats_repetitions(sre.parse(r"a((b*)x)+")), "the check itself"
    assert not repeats_repetitions(sre.parse(r'"(?:[^"\\]|\\.)*"\s+'))
    checked = dict(patterns())
    assert len(checked) > 10 and any(name.startswith(pythonic.__name__) for name in checked)
    for name, pattern in checked.items():
        assert not repeats_repetitions(sre.parse(pattern.pattern)), f"{name}: {pattern.pattern!r}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", list(TOOLS))
def test_hostile_answers_are_parsed_in_time(name: str) -> None:
    for text in HOSTILE:
        assert answer_parser(tools=name).parse(text) is not None
        in_parts = answer_parser(tools=name)
        for start in range(0, len(text), 5):
            in_parts.feed(text[start : start + 5])
        in_parts.end()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", list(REASONING))
def test_hostile_reasoning_is_parsed_in_time(name: str) -> None:
    for text in HOSTILE:
        assert answer_parser(reasoning=name).parse(text) is not None


@pytest.mark.timeout(60)
def test_attack_is_answered_as_text() -> None:
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": "pythonic"}
    tools = [{"type": "function", "function": {"name": "A"}}]
    (choice,) = chat(FakeEngine(PYTHONIC), settings, tools=tools).json()["choices"]
    assert choice["message"]["content"] == PYTHONIC
