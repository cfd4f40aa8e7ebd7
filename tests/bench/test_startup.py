"""Tests of `quire bench startup`: fresh processes, timed by the system clock."""

import json
import os
from pathlib import Path

import pytest
from tiny_text import text_model

from quire.bench.startup import Start, empty_caches, lines, summary
from quire.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_cold_and_warm_starts(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: Capture
) -> None:
    path, file = text_model(tmp_path_factory.getbasetemp()).path, tmp_path / "out.json"
    counts = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    engine = ["--model", str(path), "--dtype", "float32", "--num-gpu-blocks-override", "40"]
    assert main(["bench", "startup", *counts, *engine, "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    for kind in ("cold", "warm"):
        assert len(result[f"{kind}_startup_times"]) == 1
        order = [result[f"avg_{kind}_{name}"] for name in ("import_time", "startup_time", "first_token_time")]
        assert 0 < order[0] < order[1] < order[2] < 600, "seconds since the process began"
        assert result[f"avg_{kind}_rss_bytes"] > 2**20
    assert "Avg startup time:" in capsys.readouterr().out


def test_averages_and_percentiles() -> None:
    starts = [Start(0.1, 1.0, 2.0, 2**20), Start(0.3, 3.0, 4.0, 3 * 2**20)]
    actual = summary("cold", starts)
    assert actual["avg_cold_startup_time"] == 2.0 and actual["cold_startup_times"] == [1.0, 3.0]
    assert actual["cold_startup_time_percentiles"]["50"] == 2.0
    assert actual["cold_startup_time_percentiles"]["90"] == pytest.approx(2.8)
    shown = lines(actual)
    assert "  Avg first token: 3.000 seconds" in shown and "  Avg memory: 2 MiB" in shown
    assert not any("Warm" in line for line in shown)


def test_cold_start_keeps_downloaded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a cold start does not download the model again."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_text("x")
    (tmp_path / "kernels").mkdir()
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    with empty_caches() as variables:
        folder = Path(variables["QUIRE_CACHE_ROOT"])
        assert os.listdir(folder) == ["models"] and (folder / "models" / "m.gguf").read_text() == "x"
    assert not folder.exists() and (tmp_path / "models" / "m.gguf").exists()


def test_engine_that_does_not_start_gives_one_line(
    tmp_path_factory: pytest.TempPathFactory, capsys: Capture
) -> None:
    path = text_model(tmp_path_factory.getbasetemp()).path
    words = ["--model", str(path), "--max-model-len", "999999", "--num-iters-warm", "0"]
    assert main(["bench", "startup", *words]) == 1
    assert "the engine did not start: " in capsys.readouterr().err.splitlines()[-1]


def test_zero_iterations_are_rejected(capsys: Capture) -> None:
    assert main(["bench", "startup", "--num-iters-cold", "0", "--num-iters-warm", "0"]) == 1
    assert "nothing to measure" in capsys.readouterr().err
