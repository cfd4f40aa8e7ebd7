"""Tests of `quire bench serve` as a command against a small server."""

import json
import os
import socket
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fake_openai import MODEL, FakeServer
from PIL import Image
from tiny_text import text_model

from quire.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ("--random-input-len", "5", "--random-output-len", "4", "--disable-tqdm")
TOO_MANY = ("--random-mm-base-items-per-request", "5", "--random-mm-limit-mm-per-prompt", '{"image": 3}')


def bench(server: FakeServer, *words: str, code: int = 0) -> None:
    assert main(["bench", "serve", "--base-url", server.url, *words]) == code


def saved(server: FakeServer, folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    named = ["--save-result", "--result-dir", str(folder), "--result-filename", "run.json"]
    bench(server, *named, *words, code=code)
    actual: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return actual


def test_run_saves_and_prints_its_result(tmp_path: Path, capsys: Capture) -> None:
    with FakeServer() as server:
        actual = saved(
            server, tmp_path, "--num-prompts", "6", "--max-concurrency", "2", "--metadata", "who=me", *SMALL
        )
        assert server.peak <= 2
        assert all(
            len(request["prompt"]) == 5 and max(request["prompt"]) < 256 for request in server.requests
        )
        assert {request["model"] for request in server.requests} == {MODEL}
        assert not any("temperature" in request or "ignore_eos" in request for request in server.requests)
    shown = capsys.readouterr().out
    assert "Successful requests:                     6 " in shown and "P99 TTFT (ms):" in shown
    assert (actual["completed"], actual["total_output_tokens"], actual["total_input_tokens"]) == (6, 24, 42)
    for name, value in {
        "backend": "openai",
        "model_id": MODEL,
        "num_prompts": 6,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "failed": 0,
        "who": "me",
        "request_goodput": None,
    }.items():
        assert actual[name] == value
    assert {"date", "tokenizer_id", "duration", "std_itl_ms", "p99_tpot_ms"} <= set(actual)
    assert "ttfts" not in actual and "mean_e2el_ms" not in actual


def test_flags_become_fields(tmp_path: Path) -> None:
    words = ["--temperature", "0.5", "--top-k", "3", "--ignore-eos", "--extra-body", '{"seed": 7}']
    words += ["--model", "other", "--api-key", "secret", "--header", "X-A=1", "--num-prompts", "1"]
    with FakeServer() as server:
        bench(server, *words, *SMALL)
        (request,) = server.requests
    expected = {"temperature": 0.5, "top_k": 3, "ignore_eos": True, "seed": 7, "model": "other"}
    assert {name: request[name] for name in expected} == expected
    assert request["_headers"]["authorization"] == "Bearer secret" and request["_headers"]["x-a"] == "1"


def test_failures_are_counted_and_shown(tmp_path: Path, capsys: Capture) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "hi"}\n{"prompt": "fail"}\n{"prompt": "drop"}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "3", "--save-detailed"]
    with FakeServer() as server:
        actual = saved(server, tmp_path, *words, "--custom-output-len", "4", "--disable-tqdm")
    assert (actual["completed"], actual["failed"]) == (1, 2) and sum(map(bool, actual["errors"])) == 2
    assert {
        len(actual[name]) for name in ("input_lens", "ttfts", "itls", "generated_texts", "start_times")
    } == {3}
    assert "1 failed: HTTP 500: asked to fail" in capsys.readouterr().out


def test_run_without_a_successful_request_fails(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "fail"}\n')
    with FakeServer() as server:
        bench(server, "--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "2", code=1)


def test_chat_uses_texts_from_a_tokenizer(tmp_path_factory: pytest.TempPathFactory, capsys: Capture) -> None:
    path = text_model(tmp_path_factory.getbasetemp()).path
    with FakeServer() as server:
        bench(server, "--backend", "openai-chat", "--tokenizer", str(path), "--num-prompts", "2", *SMALL)
        assert all(isinstance(request["messages"][0]["content"], str) for request in server.requests)
        assert {request["_path"] for request in server.requests} == {"/v1/chat/completions"}
        bench(server, "--backend", "openai-chat", "--num-prompts", "2", *SMALL, code=1)
    assert "needs prompts as text: give --tokenizer" in capsys.readouterr().err


def test_random_mm_chats_have_media(tmp_path_factory: pytest.TempPathFactory, capsys: Capture) -> None:
    """Check sizes and numbers of items, and the limits per modality."""
    path = text_model(tmp_path_factory.getbasetemp()).path
    words = ["--dataset-name", "random-mm", "--tokenizer", str(path), "--num-prompts", "12", *SMALL]
    words += ["--random-mm-base-items-per-request", "2", "--random-mm-num-mm-items-range-ratio", "0.5"]
    words += ["--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 1}']
    words += ["--random-mm-bucket-config", "{(8, 12, 1): 0.5, (6, 10, 3): 0.5}"]
    with FakeServer() as server:
        bench(server, *words, code=1)
        assert "needs --backend openai-chat" in capsys.readouterr().err
        bench(server, "--backend", "openai-chat", *words)
    bodies = [request["messages"][0]["content"] for request in server.requests]
    kinds = [[part["type"] for part in parts] for parts in bodies]
    assert all(request[0] == "text" and 1 <= len(request) - 1 <= 3 for request in kinds)
    assert (
        all(request.count("video_url") <= 1 for request in kinds)
        and len({len(request) for request in kinds}) > 1
    )
    urls = [part[part["type"]]["url"] for parts in bodies for part in parts[1:]]
    assert len(set(urls)) == len(urls)
    sizes = {"image": ((12, 8), 1), "video": ((10, 6), 3)}
    for url in urls:
        head, *frames = url.removeprefix("data:").split(",")
        size, num_frames = sizes[head.removesuffix("/jpeg;base64")]
        assert [Image.open(BytesIO(b64decode(frame))).size for frame in frames] == [size] * num_frames
    assert set(sizes) == {url[5:10] for url in urls}


def test_warmups_and_the_ready_check_are_not_counted(tmp_path: Path) -> None:
    with FakeServer() as server:
        server.num_failures = 1
        words = ["--num-prompts", "2", "--num-warmups", "3", "--ready-check-timeout-sec", "10"]
        actual = saved(server, tmp_path, *words, *SMALL)
        assert len(server.requests) == 1 + 1 + 3 + 2
    assert (actual["completed"], actual["failed"]) == (2, 0)


def test_server_that_never_gets_ready_gives_one_line(capsys: Capture) -> None:
    with FakeServer() as server:
        server.num_failures = 100
        bench(server, "--num-prompts", "1", "--ready-check-timeout-sec", "0.3", *SMALL, code=1)
    assert "not ready after 0.3 s: HTTP 503: not yet" in capsys.readouterr().err


def test_goodput_and_drafts(tmp_path: Path, capsys: Capture) -> None:
    with FakeServer() as server:
        words = [
            "--num-prompts",
            "2",
            "--goodput",
            "ttft:60000",
            "e2el:60000",
            "--percentile-metrics",
            "e2el",
        ]
        actual = saved(server, tmp_path, *words, "--metric-percentiles", "50,99.9", *SMALL)
    assert actual["request_goodput"] == actual["request_throughput"] > 0
    assert "p99.9_e2el_ms" in actual and "p50_e2el_ms" in actual and "spec_decode_num_drafts" not in actual


def test_cpu_report_names_the_server_and_the_client(tmp_path: Path, capsys: Capture) -> None:
    with FakeServer() as server:
        words = ["--num-prompts", "2", "--cpu-report", "--server-pid", str(os.getppid())]
        actual = saved(server, tmp_path, *words, *SMALL)
    assert {os.getpid(), os.getppid()} <= {item["pid"] for item in actual["cpu"]}
    shown = capsys.readouterr().out
    assert "client (this process)" in shown and f" {os.getppid()} " in shown and "of one core" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--request-rate", "0"], "--request-rate 0"),
        (["--burstiness", "-1"], "--burstiness -1"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--percentile-metrics", "ttft,tptt"], "'tptt'; known: ttft, tpot, itl, e2el"),
        (["--goodput", "itl:5"], "'itl'; known: ttft, tpot, e2el"),
        (["--dataset-name", "random-mm", "--backend", "openai-chat", *TOO_MANY], "at least 5 items, but"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--server-pid", "99999999", "--cpu-report"], "no such process"),
        (["--base-url", "nowhere"], "'nowhere'"),
    ],
)
def test_errors_give_one_line(words: list[str], says: str, capsys: Capture) -> None:
    with FakeServer() as server:
        bench(server, *words, *SMALL, code=1)
    errors = capsys.readouterr().err
    assert says in errors and "Traceback" not in errors and errors.count("error:") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--goodput", "ttft"],
        ["--metric-percentiles", "101"],
        ["--header", "x"],
        ["--backend", "tgi"],
        ["--random-mm-bucket-config", "{(8, 8): 1}"],
        ["--random-mm-bucket-config", '{"(8, 8, 1": 1}'],
        ["--random-mm-limit-mm-per-prompt", '{"images": 1}'],
    ],
)
def test_invalid_flags_exit_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *words])
    assert end.value.code == 2


def test_missing_server_gives_one_line(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["bench", "serve", "--port", str(port), *SMALL]) == 1
    assert "is it running? start one with `quire serve`" in capsys.readouterr().err
