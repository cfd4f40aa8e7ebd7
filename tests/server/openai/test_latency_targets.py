"""Tests of the latency targets of a request: from its body, its API key, or the server."""

import json
from pathlib import Path
from typing import Any

import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask
from fake_engine import FakeEngine

from quire.data.latency_target import LatencyTarget

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}


def target_of(
    path: str, *, key: dict[str, Any] | None = None, folder: Path | None = None, **fields: Any
) -> Any:
    engine = FakeEngine()
    engine.inputs.target = LatencyTarget(0.5, 0.05)
    more: dict[str, Any] = {}
    if key is not None and folder is not None:
        (folder / "keys.json").write_text(json.dumps({"keys": [{"name": "a", "key": "sk"} | key]}))
        more["settings"] = {"api_key": [str(folder / "keys.json")]}
        more["headers"] = {"authorization": "Bearer sk"}
    reply = ask("POST", path, engine=engine, json=BODIES[path] | fields, **more)
    assert reply.status_code == 200, reply.text
    return engine.targets[-1]


@pytest.mark.parametrize("path", BODIES)
def test_targets_of_the_server_are_the_default(path: str) -> None:
    assert target_of(path) == LatencyTarget(0.5, 0.05)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_request_may_ask_for_later_targets_only(path: str) -> None:
    assert target_of(path, slo_ttft_ms=2000) == LatencyTarget(2.0, 0.05)
    assert target_of(path, slo_ttft_ms=1, slo_itl_ms=1) == LatencyTarget(0.5, 0.05)


def test_key_replaces_the_targets_of_the_server(tmp_path: Path) -> None:
    key = {"slo_ttft_ms": 100, "slo_itl_ms": 20}
    assert target_of(CHAT, key=key, folder=tmp_path) == LatencyTarget(0.1, 0.02)
    assert target_of(CHAT, key=key, folder=tmp_path, slo_itl_ms=40) == LatencyTarget(0.1, 0.04)


@pytest.mark.parametrize("value", [0, -5, "soon", float("inf")])
def test_wrong_targets_are_refused(value: Any) -> None:
    body = json.dumps(BODIES[CHAT] | {"slo_ttft_ms": value})
    reply = ask("POST", CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
