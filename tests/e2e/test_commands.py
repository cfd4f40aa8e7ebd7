"""Tests of the client commands (chat, complete, bench serve) against a real server."""

import json
import subprocess
import sys
from pathlib import Path

from serve_process import PATIENCE_S, ServeProcess, greedy


def quire(*words: str) -> str:
    command = [sys.executable, "-m", "quire", *words]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_prints_the_servers_answer(server: ServeProcess) -> None:
    """Catches a terminal that shows another text than the server's."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "One two"}], "max_tokens": 12}
    reply = server.client.post("/v1/chat/completions", json=body | {"temperature": 0}).json()
    flags = ("--url", f"{server.url}/v1", "--max-tokens", "12", "--temperature", "0")
    assert reply["choices"][0]["message"]["content"].strip() in quire("chat", *flags, "-q", "One two")


def test_complete_prints_the_servers_answer(server: ServeProcess) -> None:
    reply = server.client.post("/v1/completions", json=greedy(ignore_eos=False, max_tokens=12)).json()
    flags = ("--url", f"{server.url}/v1", "--max-tokens", "12", "--temperature", "0")
    assert reply["choices"][0]["text"].strip() in quire("complete", *flags, "-q", "The quick")


def test_bench_serve_counts_the_servers_tokens(server: ServeProcess, tmp_path: Path) -> None:
    """Catches a benchmark with token counts that differ from the server's."""
    before = server.metrics()
    out = tmp_path / "result.json"
    lengths = ("--random-input-len", "20", "--random-output-len", "8", "--num-prompts", "12")
    place = ("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name)
    text = quire("bench", "serve", "--port", str(server.port), *lengths, "--ignore-eos", *place)
    result, after = json.loads(out.read_text()), server.metrics()
    assert result["completed"] == 12 and "TTFT" in text
    assert result["total_output_tokens"] == 12 * 8
    for count, name in ((12 * 8, "generation_tokens_total"), (12, "request_success_total:length")):
        assert after[name] - before[name] == count
