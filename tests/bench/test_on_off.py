"""Tests of `quire bench on-off`: pairs of engines, and the table and chart of the results."""

import json
from pathlib import Path

import pytest
from tiny_text import text_model

from quire.bench.on_off import PARTS, OnOffPart, OnOffRun, Row, _one_stream, picture, table
from quire.cli import main

Capture = pytest.CaptureFixture[str]


def words(folder: Path, model: Path, *more: str) -> list[str]:
    files = ["--svg", str(folder / "bars.svg"), "--output-json", str(folder / "figures.json")]
    small = ["--model", str(model), "--dtype", "float32", "--size", "tiny", "--rounds", "1"]
    return ["bench", "on-off", *small, *files, *more]


@pytest.mark.parametrize(
    "parts",
    [
        ["prefix", "chunks", "batching"],
        pytest.param([name for name in PARTS if name != "encoder"], marks=pytest.mark.slow),
    ],
    ids=["three", "all"],
)
def test_each_feature_is_measured_off_and_on(
    parts: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: Capture
) -> None:
    model = text_model(tmp_path_factory.getbasetemp()).path
    assert main(words(tmp_path, model, "--parts", ",".join(parts))) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(parts)
    figures = json.loads((tmp_path / "figures.json").read_text())
    for actual in figures:
        assert actual["why_not"] == "" and actual["off"]["rate"] > 0 and actual["on"]["rate"] > 0, actual
    assert (tmp_path / "bars.svg").read_text().count("<rect") == 1 + 2 + 2 * len(parts)
    chunks = figures[parts.index("chunks")]
    assert chunks["off"]["gap_s"] > 0 and "longest gap" in "\n".join(lines)


@pytest.mark.slow
def test_two_ranks_with_images(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: Capture
) -> None:
    model = text_model(tmp_path_factory.getbasetemp()).path
    assert main(words(tmp_path, model, "--parts", "encoder")) == 0
    (actual,) = json.loads((tmp_path / "figures.json").read_text())
    assert actual["why_not"] == "" and actual["off"]["rate"] > 0


def test_unknown_feature_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert main(words(tmp_path, tmp_path, "--parts", "prefix,lookahead")) == 1
    assert "'lookahead'; known: batching, prefix, chunks" in capsys.readouterr().err


def test_table_shows_the_gain_or_the_reason_for_none() -> None:
    part = OnOffPart("graphs (eager)", "+15 %", {}, {}, "one stream", _one_stream)
    measured = Row(part, OnOffRun(0.5, 10.0), OnOffRun(0.25, 15.0, 0.0))
    missing = Row(part, why_not="two ranks need two GPUs")
    lines = table([measured, missing])
    assert lines[2] == "| graphs (eager) | one stream | 500.0 / 250.0 | 10.0 / 15.0 | +50 % | +15 % |"
    assert "two ranks need two GPUs" in lines[3]
    drawn = picture([measured, missing], "On & off")
    assert "On &amp; off" in drawn and "15, 1.50 x" in drawn and drawn.count("graphs") == 1
