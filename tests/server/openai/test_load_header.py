"""Tests of the response header with the engine's load."""

import json
from types import SimpleNamespace

import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask, chat
from fake_engine import FakeEngine

from quire.metrics.pages import MetricsLayout, MetricsPages

TALK = {"messages": MESSAGES}
NAME, FORMAT = "endpoint-load-metrics", "endpoint-load-metrics-format"


@pytest.fixture
def engine() -> FakeEngine:
    pages = MetricsPages(MetricsLayout(64), num_engines=2)
    for engine, (usage, waiting) in enumerate([(0.5, 3), (0.25, 0)]):
        page = pages.of_engine(engine).own
        page[pages.layout.places["kv_cache_usage_perc"]] = usage
        page[pages.layout.places["num_requests_waiting"]] = waiting
    made = FakeEngine()
    made.metrics = SimpleNamespace(pages=pages)
    return made


def test_load_is_reported_in_the_requested_format(engine: FakeEngine) -> None:
    text = ask("POST", CHAT, engine=engine, json=TALK, headers={FORMAT: "text"}).headers[NAME]
    assert text == "TEXT named_metrics.kv_cache_usage_perc=0.375, named_metrics.num_requests_waiting=3.0"
    answer = ask("POST", COMPLETIONS, engine=engine, json={"prompt": "ab"}, headers={FORMAT: "JSON"})
    kind, _, fields = answer.headers[NAME].partition(" ")
    assert kind == "JSON"
    assert json.loads(fields) == {
        "named_metrics": {"kv_cache_usage_perc": 0.375, "num_requests_waiting": 3.0}
    }


def test_load_is_not_reported_otherwise(engine: FakeEngine) -> None:
    assert NAME not in chat(engine).headers
    assert NAME not in ask("POST", CHAT, engine=engine, json=TALK, headers={FORMAT: "BIN"}).headers
