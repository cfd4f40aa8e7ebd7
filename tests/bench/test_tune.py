"""Tests of `quire tune`: tried, kept and recommended configurations."""

import json
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.bench import tune
from quire.bench.tune import Setting, TunePoint, frontier
from quire.cli import main


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int]]:
    """Return a fake measurement; larger steps have higher latency and throughput."""
    seen: list[tuple[tuple[str, ...], int]] = []
    current: list[tuple[str, ...]] = []

    @contextmanager
    def served(model: str, flags: list[str]) -> Any:
        current.append(tuple(flags))
        yield "http://nowhere"

    def measure(args: Namespace, url: str, level: int) -> tuple[float, float, float, float]:
        seen.append((current[-1], level))
        tokens = int(current[-1][0].partition("=")[2])
        has_targets = any(flag.startswith("--slo-ttft-ms") for flag in current[-1])
        return tokens / (20 if has_targets else 10), level * 2.0, tokens * level / 4, 1.5

    monkeypatch.setattr(tune, "served", served)
    monkeypatch.setattr(tune, "_measure", measure)
    return seen


def flags(folder: Path, *more: str) -> list[str]:
    tried = ["--max-num-batched-tokens", "512,8192", "--max-num-seqs", "32", "--concurrency", "1,8,64"]
    places = ["--journal", str(folder / "j.jsonl"), "--svg", str(folder / "p.svg")]
    return ["tune", "model", *tried, *places, *more]


def test_best_configuration_within_the_limits_is_recommended(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path, "--ttft", "1s", "--itl", "20ms", "--serve-args", "--dtype float32")) == 0
    output = capsys.readouterr().out
    assert (
        "--max-num-batched-tokens=8192 --max-num-seqs=32 --dtype float32" in output
        and "at 8 at once" in output
    )
    assert "<svg" in (tmp_path / "p.svg").read_text() and len(measured) == 9
    assert main(flags(tmp_path, "--ttft", "100ms", "--itl", "20ms", "--serve-args", "--dtype float32")) == 0
    assert "=512 " in capsys.readouterr().out
    assert len(measured) == 12, "a known configuration was measured again"


def test_tuning_continues_after_a_failed_run(measured: list[Any], tmp_path: Path) -> None:
    key = ["model", 512, 128, 4, ""]
    known = TunePoint(Setting(512, 32), 8, 1.0, 1.0, 1.0)
    lines = [
        json.dumps({"of": key, "point": known}),
        json.dumps({"of": ["other"], "point": known._replace(concurrency=64)}),
        '{"of": ["mo',
    ]
    (tmp_path / "j.jsonl").write_text("\n".join(lines) + "\n")
    main(flags(tmp_path))
    assert [level for started, level in measured if "=512" in started[0]] == [1, 64] and len(measured) == 8


def test_latency_targets_are_tried_and_what_is_missed_is_named(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path, "--ttft", "500ms", "--itl", "20ms")) == 0
    output = capsys.readouterr().out
    assert "--max-num-batched-tokens=8192 --max-num-seqs=32 --slo-ttft-ms=500 --slo-itl-ms=20" in output
    assert " first tokens" in output and "first tokens and times between tokens" in output
    assert len(measured) == 9


def test_no_configuration_within_the_limits_is_reported(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path, "--itl", "1ms")) == 1
    assert "Nothing keeps" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--ttft", "soon"], ["--itl", "0ms"], ["--concurrency", "1,x"]])
def test_invalid_arguments_are_named(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "model", *wrong]) == 1
    assert wrong[1] in capsys.readouterr().err


def test_frontier_has_no_dominated_points() -> None:
    points = [
        TunePoint(Setting(1, 1), n, 1.0, itl, rate)
        for n, (itl, rate) in enumerate([(1, 5), (2, 4), (3, 9), (3, 8)])
    ]
    assert [point.concurrency for point in frontier(points)] == [0, 2]


@pytest.mark.slow
def test_sweep_with_real_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check with the packaged model, which takes about a minute."""
    flags = [
        "--max-num-batched-tokens",
        "512",
        "--max-num-seqs",
        "8",
        "--concurrency",
        "1,4",
        "--requests",
        "2",
    ]
    places = ["--journal", str(tmp_path / "j"), "--svg", str(tmp_path / "p.svg")]
    more = ["--input-len", "32", "--output-len", "16", "--ttft", "60s", "--itl", "60s"]
    assert main(["tune", "default", *flags, *places, *more]) == 0
    assert "quire serve default --max-num-batched-tokens=512" in capsys.readouterr().out
