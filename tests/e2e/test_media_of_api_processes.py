"""Tests of a server with several API processes: an image is processed once for all of them."""

import os
import signal
from pathlib import Path

import httpx
import pytest
from preloaded import Preloaded
from serve_process import ServeProcess, eventually
from test_shared_media import TEMPLATE, URLS
from tiny_qwen import made

FLAGS = (
    *("--api-server-count", "2", "--mm-processor-cache-gb", "0.01", "--dtype", "float32"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"),
    *("--served-model-name", "tiny", "--no-enable-prefix-caching"),
)


def ask(server: ServeProcess) -> str:
    """Ask about one image over a new connection."""
    parts = [{"type": "image_url", "image_url": {"url": URLS[0]}}, {"type": "text", "text": "What is this?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    url = f"{server.client.base_url}/v1/chat/completions"
    reply = httpx.post(url, json=body | {"temperature": 0, "ignore_eos": True}, timeout=100)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def test_image_is_processed_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, preloaded: Preloaded
) -> None:
    path, _ = made("Qwen2_5_VL", tmp_path_factory.getbasetemp())
    (tmp_path / "template").write_text(TEMPLATE)
    flags = (*FLAGS, "--chat-template", str(tmp_path / "template"))
    with ServeProcess(str(path), *flags, log=tmp_path / "log", preloaded=preloaded) as server:
        server.until_healthy(num_api=2)
        answers = {ask(server) for _ in range(5)}
        counted = server.metrics()
        assert len(answers) == 1 and counted["mm_cache_queries_total"] == 5
        assert counted["mm_cache_hits_total"] == 4
        processes = server.with_role("APIServer")
        assert len(processes) == 2 and all(served(server, number) for number in range(2))
        os.kill(processes[0], signal.SIGKILL)
        eventually("the API process is replaced", lambda: is_replaced(server, processes))
        answers |= {ask(server) for _ in range(4)}
        counted = server.metrics()
        assert len(answers) == 1 and counted["mm_cache_hits_total"] == counted["mm_cache_queries_total"] - 1
        server.end_cleanly()


def served(server: ServeProcess, number: int) -> bool:
    """Whether an API process has answered a chat request."""
    lines = server.text().splitlines()
    return any(f"APIServer{number}" in line and "/v1/chat/completions" in line for line in lines)


def is_replaced(server: ServeProcess, before: list[int]) -> bool:
    now = server.with_role("APIServer")
    return len(now) == 2 and before[0] not in now and server.health() == 200
