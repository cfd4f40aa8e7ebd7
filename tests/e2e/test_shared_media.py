"""Tests of a server with images in shared memory for its two ranks: they are cached there, not sent, and
released when a process dies."""

import os
import signal
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from preloaded import Preloaded
from serve_process import ServeProcess, events, eventually
from tiny_qwen import made

TEMPLATE = """{% for message in messages %}{% for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}<begin><image><end>{% endif %}
{%- endfor %}{% endfor %}"""
FLAGS = (
    *("-tp", "2", "--mm-processor-cache-type", "shm", "--mm-processor-cache-gb", "0.0005"),
    *(
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
        "--num-gpu-blocks-override",
        "64",
    ),
    *("--served-model-name", "tiny", "--no-enable-prefix-caching"),
)
"""Flags for a cache with space for some of the images."""


def url_of(seed: int) -> str:
    pixels, file = np.random.default_rng(seed).integers(0, 256, (24 + seed, 32, 3), np.uint8), BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


URLS = [url_of(seed) for seed in range(12)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded) -> Iterator[ServeProcess]:
    path, _ = made("Qwen2_5_VL", tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("shared_media")
    (folder / "template").write_text(TEMPLATE)
    flags = (*FLAGS, "--chat-template", str(folder / "template"))
    with ServeProcess(str(path), *flags, log=folder / "log", preloaded=preloaded) as started:
        started.until_healthy()
        yield started
        started.end_cleanly()


def answer_about(server: ServeProcess, *seeds: int) -> str:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": URLS[seed]}} for seed in seeds]
    parts.append({"type": "text", "text": "What is this?"})
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
    reply = server.client.post("/v1/chat/completions", json={"model": "tiny", "ignore_eos": True} | body)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def all_answers(server: ServeProcess) -> list[str]:
    """Run several conversations at once, each with a repeated image."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda seed: answer_about(server, seed, seed % 5), range(12)))


def num_mapped(pid: int) -> int:
    """Return the number of shared media segments that a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        return sum("quire-media" in line for line in maps)


def test_images_in_shared_memory_survive_a_killed_process(server: ServeProcess) -> None:
    before = {name for name in os.listdir("/dev/shm") if "quire" in name}
    first = all_answers(server)
    assert len(set(first)) > 1 and all_answers(server) == first
    counted = server.metrics()
    # An item that the core lost is looked up once more.
    assert counted["mm_cache_hits_total"] > 0 and counted["mm_cache_queries_total"] >= 48
    processes = [server.core, *server.with_role("APIServer"), *server.with_role("Worker_TP")]
    assert [num_mapped(pid) for pid in processes] == [1] * 4
    for role in ("EngineCore", "APIServer"):
        (victim,) = server.with_role(role)
        os.kill(victim, signal.SIGKILL)
        eventually(
            "another process has started", lambda gone=victim, role=role: _is_replaced(server, role, gone)
        )
        assert all_answers(server) == first
    processes = [server.core, *server.with_role("APIServer"), *server.with_role("Worker_TP")]
    eventually(
        "the memory of the dead process is gone", lambda: [num_mapped(pid) for pid in processes] == [1] * 4
    )
    assert {name for name in os.listdir("/dev/shm") if "quire" in name} <= before
    eventually("no request runs", lambda: server.metrics()["num_requests_running"] == 0)


def test_image_streams_resume_in_the_restarted_core(server: ServeProcess) -> None:
    """Two sequences of one prompt both need the image again after the restart."""
    parts = [{"type": "image_url", "image_url": {"url": URLS[3]}}, {"type": "text", "text": "What is this?"}]
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "stream": True}
    body |= {"n": 2, "seed": 1, "temperature": 1, "ignore_eos": True}
    core, before = server.core, server.metrics()["request_resumed_total"]

    def texts_of(max_tokens: int, expected: list[str]) -> list[str]:
        """Return the texts of a stream. If texts are expected, the core is killed after six events, and the
        stream is closed when it was resumed and all of the expected text is there."""
        texts = ["", ""]
        with server.client.stream(
            "POST", "/v1/chat/completions", json=body | {"max_tokens": max_tokens}
        ) as reply:
            for number, event in enumerate(events(reply.iter_lines())):
                if expected and number == 6:
                    os.kill(core, signal.SIGKILL)
                for choice in event["choices"] if isinstance(event, dict) else ():
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                is_complete = expected and all(map(str.startswith, texts, expected))
                if is_complete and server.metrics()["request_resumed_total"] > before:
                    break
        return texts

    expected = texts_of(60, [])
    texts = texts_of(300, expected)  # it has not ended when the core is killed
    assert all(map(str.startswith, texts, expected)), (texts, expected)
    assert server.metrics()["request_resumed_total"] == before + 1


def _is_replaced(server: ServeProcess, role: str, gone: int) -> bool:
    result = server.with_role(role)
    return len(result) == 1 and result[0] != gone and server.health() == 200
