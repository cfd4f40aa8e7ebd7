"""Tests of `quire bench`: lines and JSON in the format of vLLM."""

import json
import re
from pathlib import Path

import pytest
from tiny_text import CORPUS, TextModel, text_model

from quire.cli import main

Capture = pytest.CaptureFixture[str]
NUMBER = r"\d+(\.\d+)?(e-\d+)?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def bench(model: TextModel, capsys: Capture, *words: str) -> list[str]:
    kind, *flags = words
    small = ["--model", str(model.path), "--dtype", "float32", "--num-gpu-blocks-override", "80"]
    assert main(["bench", kind, *small, *flags]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("way", ["", "--n 2", "--use-beam-search --n 2", "--disable-detokenize"])
def test_latency(model: TextModel, tmp_path: Path, capsys: Capture, way: str) -> None:
    file = tmp_path / "latency.json"
    sizes = f"--input-len 4 --output-len 3 --batch-size 2 --num-iters-warmup 1 --num-iters 3 {way}"
    lines = bench(model, capsys, "latency", *sizes.split(), "--output-json", str(file))
    assert re.fullmatch(f"Avg latency: {NUMBER} seconds", lines[0])
    expected = [f"{percent}% percentile latency: " for percent in (10, 25, 50, 75, 90, 99)]
    assert [re.sub(f"{NUMBER} seconds$", "", line) for line in lines[1:]] == expected
    result = json.loads(file.read_text())
    assert set(result) == {"avg_latency", "latencies", "percentiles"} and len(result["latencies"]) == 3
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)


def test_throughput(model: TextModel, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "throughput.json"
    sizes = "--input-len 4 --output-len 3 --num-prompts 5 --n 2"
    lines = bench(model, capsys, "throughput", *sizes.split(), "--output-json", str(file))
    assert re.fullmatch(
        f"Throughput: {NUMBER} requests/s, {NUMBER} total tokens/s, {NUMBER} output tokens/s", lines[0]
    )
    assert lines[1:] == ["Total num prompt tokens:  20", "Total num output tokens:  30"]
    result = json.loads(file.read_text())
    assert result["num_requests"] == 5 and result["total_num_tokens"] == 50
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(50 / result["elapsed_time"])


def test_throughput_on_conversations(model: TextModel, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "talk.json"
    turns = [{"conversations": [{"value": CORPUS[0]}, {"value": CORPUS[2]}]}]
    file.write_text(json.dumps(turns))
    named = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "2"]
    lines = bench(model, capsys, "throughput", *named, "--output-len", "5")
    assert lines[2] == "Total num output tokens:  10"


def test_dataset_without_its_file_gives_one_line(model: TextModel, capsys: Capture) -> None:
    assert main(["bench", "throughput", "--model", str(model.path), "--dataset-name", "sharegpt"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "quire bench throughput: error: --dataset-name sharegpt needs --dataset-path FILE"


@pytest.mark.parametrize("flags", [["--output-len", "0"], ["--n", "0"], ["--input-len", "500"]])
def test_invalid_sizes_give_one_line(model: TextModel, capsys: Capture, flags: list[str]) -> None:
    assert main(["bench", "latency", "--model", str(model.path), "--dtype", "float32", *flags]) == 1
    assert "quire bench latency: error: " in capsys.readouterr().err.splitlines()[-1]
