"""Tests of the `quire run-batch` command: complete, with errors, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer

from quire.batch import run as batch_run
from quire.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "FIRST_WAIT_S", 0.01)


def write(folder: Path, prompts: dict[str, str], *more: str, chat: bool = False) -> Path:
    path = folder / "in.jsonl"
    lines = []
    for custom_id, prompt in prompts.items():
        body: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        )
        url = "/v1/chat/completions" if chat else "/v1/completions"
        lines.append(json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}))
    path.write_text("\n".join([*lines, *more]) + "\n")
    return path


def words(server: FakeServer, path: Path, *more: str) -> list[str]:
    return ["run-batch", "-i", str(path), "-o", str(path.with_name("out.jsonl")), "--url", server.url, *more]


def output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_name("out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("chat", [False, True])
def test_every_request_is_answered_in_order(tmp_path: Path, chat: bool) -> None:
    prompts = {f"id-{i}": f"prompt {i}" for i in range(20)}
    path = write(tmp_path, prompts, chat=chat)
    with FakeServer(delay_s=0.002) as server:
        assert main(words(server, path, "--max-concurrency", "4")) == 0
        assert server.peak <= 4
    result = output(path)
    assert [item["custom_id"] for item in result] == list(prompts)
    for item, prompt in zip(result, prompts.values(), strict=True):
        choice = item["response"]["body"]["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        assert text == f"echo {prompt}" and item["response"]["status_code"] == 200 and item["error"] is None
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_invalid_lines_get_error_lines_in_their_place(tmp_path: Path, capsys: Capture) -> None:
    path = write(
        tmp_path, {"a": "hi", "b": "refuse"}, "{", '{"custom_id": "a", "url": "/v1/completions", "body": {}}'
    )
    with FakeServer() as server:
        assert main(words(server, path)) == 0
        assert len(server.requests) == 2
    good, refused, torn, double = output(path)
    assert good["response"]["status_code"] == 200
    assert refused["response"]["status_code"] == 400 and "asked to refuse" in str(refused["response"]["body"])
    assert torn["response"] is None and "line 3" in torn["error"]["message"]
    assert double["custom_id"] == "a" and "used by line 1" in double["error"]["message"]
    shown = capsys.readouterr().out
    assert (
        "1 of 4 requests answered, 3 refused" in shown
        and "First refused: b: HTTP 400: asked to refuse" in shown
    )


def test_busy_server_is_retried(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "hi", "b": "fail"})
    with FakeServer() as server:
        server.num_failures = 2
        assert main(words(server, path, "--max-retries", "3", "--max-concurrency", "1")) == 0
        assert [request["prompt"] for request in server.requests] == ["hi"] * 3 + ["fail"] * 4
    good, bad = output(path)
    assert good["response"]["status_code"] == 200 and bad["response"]["status_code"] == 500


def test_lost_server_keeps_the_finished_answers(tmp_path: Path, capsys: Capture) -> None:
    """Unanswered requests are not recorded as failed: the next run sends them."""
    path = write(tmp_path, {"a": "hi"})
    with FakeServer() as server:
        pass
    assert main(words(server, path, "--max-retries", "1")) == 1
    errors = capsys.readouterr().err
    assert (
        "is it running?" in errors and "0 of 1 requests are answered" in errors and "Traceback" not in errors
    )
    assert not path.with_name("out.jsonl").exists()
    with FakeServer() as server:
        assert main(words(server, path)) == 0
    assert output(path)[0]["response"]["status_code"] == 200


def kill_midway(server: FakeServer, path: Path) -> set[str]:
    """Run in a process, kill it midway, and return the ids with answers on disk."""
    part = path.with_name("out.jsonl.part")
    command = [sys.executable, "-m", "quire", *words(server, path, "--max-concurrency", "2")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not part.exists() or part.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    return {
        json.loads(line)["custom_id"]
        for line in part.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    }


def test_killed_run_resumes(tmp_path: Path) -> None:
    """Finished lines are requested once in both runs together; none is missing at the end."""
    prompts = {f"id-{i}": f"prompt {i}" for i in range(40)}
    path = write(tmp_path, prompts)
    part = path.with_name("out.jsonl.part")
    with FakeServer() as server:
        server.most_answers = 20
        done = kill_midway(server, path)
        server.most_answers = 10**9
        assert 5 <= len(done) <= 20 and not path.with_name("out.jsonl").exists()
        with part.open("ab") as file:
            file.write(b'{"id": "batch_req_1", "custom_id": "id-39", "resp')
        server.requests.clear()
        assert main(words(server, path)) == 0
        again = {request["prompt"] for request in server.requests}
    assert again == {prompt for custom_id, prompt in prompts.items() if custom_id not in done}
    result = output(path)
    assert [item["custom_id"] for item in result] == list(prompts)
    assert all(item["response"]["status_code"] == 200 for item in result) and not part.exists()


def test_run_that_lacks_only_its_output_needs_no_server(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "hi"})
    with FakeServer() as server:
        assert main(words(server, path)) == 0
        (line,) = output(path)
        path.with_name("out.jsonl").rename(path.with_name("out.jsonl.part"))
    assert main(words(server, path)) == 0
    assert output(path) == [line]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--url", "nonsense"], "'nonsense'"),
        (["--max-model-len", "5"], "--max-model-len has no meaning with --url"),
        (["--reasoning-parser", "qwen3"], "--reasoning-parser has no meaning with --url"),
        (["--tool-call-parser", "hermis"], "did you mean 'hermes'"),
        (["-i", "/nowhere/in.jsonl"], "/nowhere/in.jsonl"),
        (["-o", "/nowhere/out.jsonl"], "/nowhere/out.jsonl.part cannot be written"),
    ],
)
def test_invalid_arguments_are_one_line_errors(
    tmp_path: Path, capsys: Capture, flags: list[str], says: str
) -> None:
    with FakeServer() as server:
        assert main(words(server, write(tmp_path, {"a": "hi"}), *flags)) == 1
        assert not server.requests
    errors = capsys.readouterr().err
    assert says in errors and "Traceback" not in errors


def test_url_may_end_in_v1(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": "hi"})
    with FakeServer() as server:
        assert main(words(server, path, "--url", f"{server.url}/v1/")) == 0
    assert output(path)[0]["response"]["status_code"] == 200
