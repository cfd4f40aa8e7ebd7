"""Tests of agent sessions: their shape, traces, the perfect cache, and a run against a caching server."""

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_openai import MODEL, FakeServer, event

from quire.bench.agent import (
    AgentPrompt,
    AgentShape,
    AgentTurn,
    PerfectCache,
    longest,
    range_of,
    synthetic_sessions,
    trace_sessions,
)
from quire.bench.agent_run import TurnRecord, agent_lines, agent_summary
from quire.bench.traffic import Record
from quire.cli import main
from quire.errors import ConfigError

DEFAULT: dict[str, Any] = {
    "turns": (33, 43),
    "first_len": 12_000,
    "last_len": (80_000, 140_000),
    "input_per_output": 130.0,
    "tool_spread": 1.0,
    "pause_median_s": 5.0,
    "pause_p99_s": 81.0,
    "think_s": 0.0,
    "think_every": 10,
    "scale": 1.0,
    "time_scale": 1.0,
}


def test_default_sessions_have_the_shape_of_published_traces() -> None:
    sessions = synthetic_sessions(60, AgentShape(**DEFAULT), seed=3)
    assert all(33 <= len(session.turns) <= 43 for session in sessions)
    assert {session.turns[0].prompt_len for session in sessions} == {12_000}
    assert all(80_000 <= session.turns[-1].prompt_len <= 140_100 for session in sessions)
    num_prompt = sum(turn.prompt_len for session in sessions for turn in session.turns)
    num_output = sum(turn.output_len for session in sessions for turn in session.turns)
    reused = sum(turn.prompt_len + turn.output_len for session in sessions for turn in session.turns[:-1])
    assert 0.93 < reused / num_prompt < 0.97
    assert 110 < num_prompt / num_output < 150
    pauses = np.array([turn.pause_s for session in sessions for turn in session.turns[1:]])
    assert 4 < np.median(pauses) < 6 and 50 < np.percentile(pauses, 99) < 120
    assert all(session.turns[0].pause_s == 0 for session in sessions)


def test_sessions_depend_only_on_the_seed() -> None:
    shape = AgentShape(**DEFAULT)
    assert synthetic_sessions(3, shape, seed=1) == synthetic_sessions(3, shape, seed=1)
    assert synthetic_sessions(3, shape, seed=1) != synthetic_sessions(3, shape, seed=2)


def test_user_thinks_before_some_turns() -> None:
    changes = {"pause_median_s": 0.0, "think_s": 30.0, "think_every": 4, "time_scale": 2.0}
    (session,) = synthetic_sessions(1, AgentShape(**DEFAULT | changes), seed=0)
    assert [number for number, turn in enumerate(session.turns) if turn.pause_s] == [
        number for number in range(1, len(session.turns)) if number % 4 == 0
    ]


def test_prompts_grow_by_the_answer_and_new_tokens() -> None:
    prompt = AgentPrompt("a", vocab=50, seed=0)
    first = prompt.turn(AgentTurn(20, 4))
    prompt.answer([7, 8, 9, 10])
    second = prompt.turn(AgentTurn(30, 4))
    assert second[:24] == [*first, 7, 8, 9, 10] and len(second) == 30
    assert prompt.turn(AgentTurn(10, 4)) != second[:10], "a shorter prompt begins anew"
    other = AgentPrompt("b", vocab=50, seed=0).turn(AgentTurn(20, 4))
    assert other != first
    shared = [AgentPrompt(name, vocab=50, seed=0, shared_len=12).turn(AgentTurn(20, 4)) for name in "ab"]
    assert shared[0][:12] == shared[1][:12] and shared[0] != shared[1]


def test_perfect_cache_counts_whole_blocks_without_the_last_token() -> None:
    cache, tokens = PerfectCache(4), list(range(17))
    assert cache.hit(tokens) == 0
    cache.add(tokens)
    assert cache.hit(tokens) == 16
    assert cache.hit(tokens[:16]) == 12
    assert cache.hit([*tokens[:9], 99, *tokens[10:]]) == 8
    assert cache.hit([99, *tokens[1:]]) == 0


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_trace_lines_become_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"session_id": "a", "timestamp": 1500, "input_length": 600, "output_length": 10},
        {"input_length": 700, "output_length": 20, "hash_ids": [1, 2], "timestamp": 0, "model": "x"},
        {"session_id": "a", "delay": 2.0, "input_length": 800, "output_length": 10},
    )
    first, second = trace_sessions(path, time_scale=0.5)
    assert [(turn.prompt_len, turn.at_s, turn.pause_s) for turn in first.turns] == [
        (600, 0.75, 0.0),
        (800, None, 1.0),
    ]
    assert (len(second.turns), longest([first, second])) == (1, 810)
    blocks = [
        AgentPrompt(name, vocab=90, seed=0).turn(AgentTurn(700, 1, hash_ids=ids))
        for name, ids in (("x", (1, 2)), ("y", (1, 3)))
    ]
    assert len(blocks[0]) == 700 and blocks[0][:512] == blocks[1][:512] and blocks[0] != blocks[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"input_length": 5}', "output_length"),
        ('{"input_length": 0, "output_length": 1}', ">= 1"),
        ('{"input_length": "5", "output_length": 1}', "input_length"),
        ('{"input_length": 600, "output_length": 1, "hash_ids": [4]}', "512"),
        ("[]", "object"),
        ("", "no lines"),
    ],
)
def test_invalid_trace_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "trace.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        trace_sessions(tmp_path / "trace.jsonl")


def test_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        trace_sessions(tmp_path / "none.jsonl")


@pytest.mark.parametrize(("text", "expected"), [("5", (5, 5)), ("2:9", (2, 9))])
def test_range(text: str, expected: tuple[int, int]) -> None:
    assert range_of(text) == expected


@pytest.mark.parametrize("text", ["", "a", "9:2", "0:4", "1:2:3"])
def test_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="LOW:HIGH"):
        range_of(text)


def turn_record(number: int, prompt_len: int, perfect: int, cached: int | None, ttft: float) -> TurnRecord:
    record = Record(prompt_len, start=0.0, end=ttft, arrivals=[ttft], num_cached=cached)
    return TurnRecord("s", number, perfect, record)


def test_summary_compares_with_a_perfect_cache() -> None:
    turns = [turn_record(0, 100, 0, 0, 1.0), turn_record(1, 200, 160, 80, 0.25)]
    failed = TurnRecord("s", 2, 50, Record(300, error="failed"))
    summary = agent_summary([*turns, failed])
    assert summary == {
        "agent_sessions": 1,
        "agent_perfect_hit_rate": pytest.approx(160 / 3),
        "agent_perfect_computed_tokens": 140,
        "agent_ttft_by_turn_ms": [1000.0, 250.0],
        "agent_hit_rate": pytest.approx(80 / 3),
        "agent_hit_rate_of_perfect": 50.0,
        "agent_computed_tokens": 220,
        "agent_cost_of_perfect": pytest.approx(220 / 140),
    }
    shown = "\n".join(agent_lines(summary))
    assert "Cost against a perfect cache (x):        1.57" in shown and "turn 2:" in shown
    assert agent_lines({}) == []


def test_server_without_details_is_measured_by_its_counters() -> None:
    turns = [turn_record(0, 100, 0, None, 1.0), turn_record(1, 200, 160, None, 0.25)]
    assert agent_summary(turns, 120)["agent_hit_rate"] == pytest.approx(40.0)
    assert "agent_hit_rate" not in agent_summary(turns)


class CachingServer(FakeServer):
    """A server with a prefix cache of 16 tokens per block, which returns token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PerfectCache()

    async def _stream(
        self, prompt: str, request: dict[str, Any], chat: bool, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        tokens, count = request["prompt"], request["max_tokens"]
        output = [number % 7 for number in range(count)]
        details = {"cached_tokens": self.cache.hit(tokens)}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": count, "prompt_tokens_details": details}
        choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": output}
        event(writer, json.dumps({"choices": [choice]}))
        event(writer, json.dumps({"choices": [], "usage": usage}))
        event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        self.cache.add([*tokens, *output])
        return True


SMALL = (
    *("--dataset-name", "agent", "--agent-num-sessions", "3", "--agent-turns", "4:6", "--disable-tqdm"),
    *("--agent-scale", "0.01", "--agent-time-scale", "0"),
)


def test_run_against_a_server_with_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CachingServer() as server:
        words = [*SMALL, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "run.json"]
        assert main(["bench", "serve", "--base-url", server.url, *words]) == 0
        requests = server.requests
    result = json.loads((tmp_path / "run.json").read_text())
    turns = Counter(request["session_id"] for request in requests)
    assert result["completed"] == len(requests) and all(4 <= count <= 6 for count in turns.values())
    assert result["agent_sessions"] == 3
    assert result["agent_hit_rate"] == pytest.approx(result["agent_perfect_hit_rate"])
    assert result["agent_cost_of_perfect"] == 1.0 and 40 < result["agent_hit_rate"] < 100
    shown = capsys.readouterr().out
    assert "Hits of a perfect cache (%):             100.00" in shown and "TTFT (ms), turn 1:" in shown


def test_answers_are_left_out_for_a_server_without_token_ids(tmp_path: Path) -> None:
    with FakeServer() as server:
        assert main(["bench", "serve", "--base-url", server.url, *SMALL, "--agent-hint", "none"]) == 0
        requests = server.requests
    assert not any("session_id" in request or "prompt_cache_key" in request for request in requests)
    assert {request["model"] for request in requests} == {MODEL}
    assert all(request["ignore_eos"] for request in requests)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--agent-num-sessions", "0"], "--agent-num-sessions"),
        (["--agent-scale", "0"], "--agent-scale"),
        (["--agent-pause-p99", "1"], "--agent-pause-p99"),
        (["--agent-think-time", "-1"], "--agent-think-time"),
        (["--backend", "openai-chat"], "--backend openai"),
    ],
)
def test_invalid_flags_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        assert main(["bench", "serve", "--base-url", server.url, *SMALL, *words]) != 0
    assert message in capsys.readouterr().err
