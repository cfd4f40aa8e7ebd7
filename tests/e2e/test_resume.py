"""The only core of a server is killed under streams: they pause, and their answers stay the same."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
import torch
from preloaded import Preloaded
from saved import sent
from serve_process import PATIENCE_S, SHARED_FLAGS, ServeProcess, Start, events, eventually, joined
from tiny_adapter import write_adapter
from tiny_text import TextModel

LENGTH = 800
"""Tokens of an answer that is not complete when the core is killed."""
LIST = {
    "type": "array",
    "items": {"type": "string", "minLength": 4, "maxLength": 4},
    "minItems": 60,
    "maxItems": 60,
}
BOUND = {"json": LIST, "disable_any_whitespace": True}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLAIN = {"prompt": "The quick", "temperature": 0, "ignore_eos": True, "max_tokens": LENGTH}
SEEDED = PLAIN | {"temperature": 1, "seed": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TEXT, PLAIN),
    "seeded": (TEXT, SEEDED),
    "several": (TEXT, SEEDED | {"n": 2}),
    "logprobs": (TEXT, SEEDED | {"logprobs": 2}),
    "penalties": (TEXT, SEEDED | {"frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "schema": (TEXT, SEEDED | {"ignore_eos": False, "structured_outputs": BOUND, "max_tokens": 2000}),
    "adapter": (TEXT, SEEDED | {"model": "styled"}),
    "chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "A page is"}],
            "temperature": 1,
            "seed": 5,
            "ignore_eos": True,
            "max_tokens": LENGTH,
            "logprobs": True,
        },
    ),
}


@pytest.fixture(scope="module")
def single(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("single")
    write_adapter(folder / "styled", json.loads((tiny.path / "config.json").read_text()), 1)
    flags = ("--enable-lora", "--lora-modules", f"styled={folder}/styled")
    log = folder / "log"
    with ServeProcess(str(tiny.path), *SHARED_FLAGS, *flags, log=log, preloaded=preloaded) as started:
        started.until_healthy()
        yield started
        started.end_cleanly()


@contextmanager
def stream(server: ServeProcess, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any] | str]]:
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}} | body
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh,
        fresh.stream("POST", path, json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield events(reply.iter_lines())


def whole(found: list[dict[str, Any] | str]) -> dict[str, Any]:
    """What a stream has told: by choice its text, logprobs and end, and the usage."""
    assert found[-1] == "[DONE]" and isinstance(found[-2], dict), found[-2:]
    told: dict[int, dict[str, Any]] = {}
    for event in found[:-1]:
        assert isinstance(event, dict) and "error" not in event, event
        for choice in event["choices"]:
            sequence = told.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
            sequence["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            sequence["logprobs"] += logprobs.get("tokens") or [
                each["token"] for each in logprobs.get("content") or ()
            ]
            sequence["end"] = choice["finish_reason"] or sequence["end"]
    return {"choices": told, "usage": found[-2]["usage"]}


def test_streams_of_all_kinds_go_on_in_the_restarted_core(single: ServeProcess, tiny: TextModel) -> None:
    """Catches text, logprobs and usage that are lost or told twice, and a grammar that starts over."""
    vectors = tiny.hf.get_input_embeddings()(torch.tensor([1, 40, 300, 77, 310])).detach()
    kinds = KINDS | {"vectors": (TEXT, SEEDED | {"prompt": None, "prompt_embeds": sent(vectors)})}
    ready = Barrier(len(kinds) + 1)

    def disturbed(kind: str) -> dict[str, Any]:
        with stream(single, *kinds[kind]) as chunks:
            found = [next(chunks) for _ in range(5)]
            ready.wait(PATIENCE_S)
            return whole([*found, *chunks])

    def undisturbed(kind: str) -> dict[str, Any]:
        with stream(single, *kinds[kind]) as chunks:
            return whole(list(chunks))

    dead = single.core
    with ThreadPoolExecutor(len(kinds)) as pool:
        os.kill(dead, signal.SIGSTOP)  # all streams begin together: none ends before another has begun
        answers = pool.map(disturbed, kinds)
        eventually("all wait", lambda: single.client.get("/load").json()["server_load"] == len(kinds))
        os.kill(dead, signal.SIGCONT)
        ready.wait(PATIENCE_S)
        os.kill(dead, signal.SIGKILL)
        eventually("it is unhealthy", lambda: single.health() == 503)
        refused = single.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        found = dict(zip(kinds, answers, strict=True))
        expected = dict(zip(kinds, pool.map(undisturbed, kinds), strict=True))
    assert refused.status_code == 503, "a new request can be sent elsewhere"
    for kind in kinds:
        for told in (found[kind], expected[kind]):
            told["usage"].pop("prompt_tokens_details", None)  # later ones find their prompt in the cache
        assert found[kind] == expected[kind], kind
    assert len(json.loads(found["schema"]["choices"][0]["text"])) == LIST["minItems"]
    assert single.core != dead and single.health() == 200
    numbers = single.metrics()
    assert numbers["request_resumed_total"] == len(kinds)
    assert numbers["request_success_total:error"] == 0


def test_a_client_that_hangs_up_in_the_pause_leaves_nothing(single: ServeProcess) -> None:
    before = single.metrics()
    with single.streaming(max_tokens=8000) as chunks:
        next(chunks)
        os.kill(single.core, signal.SIGKILL)
        eventually("it is unhealthy", lambda: single.health() == 503)
        eventually("its numbers are gone", lambda: single.metrics()["num_requests_running"] == 0)
    eventually("it is healthy again", lambda: single.health() == 200)
    eventually("the request was aborted", lambda: single.metrics()["request_success_total:abort"] == 1)
    after = single.metrics()
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0
    assert after["request_resumed_total"] == before["request_resumed_total"]


def test_sigterm_in_the_pause_lets_answers_finish(start: Start) -> None:
    """Catches a core that is not restarted while the server drains, and streams that wait for it in vain."""
    server = start("--shutdown-timeout", "100")
    server.until_healthy()
    with server.streaming(max_tokens=LENGTH) as chunks:
        found = [next(chunks)]
        os.kill(server.core, signal.SIGKILL)
        eventually("it is unhealthy", lambda: server.health() == 503)
        server.process.send_signal(signal.SIGTERM)
        found += chunks
    assert found[-1] == "[DONE]" and isinstance(found[-2], dict) and "error" not in found[-2], found[-2]
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert server.exit_code() == 0, server.text()
    assert "Traceback" not in server.text(), server.text()


def test_a_core_that_stays_away_ends_its_answers(start: Start, tiny: TextModel, tmp_path: Path) -> None:
    """Catches streams that wait for ever for a core that cannot start."""
    copy = tmp_path / "model"
    shutil.copytree(tiny.path, copy)
    server = start("--health-timeout", "2", model=str(copy))
    server.until_healthy()
    with server.streaming(max_tokens=8000) as chunks:
        next(chunks)
        (copy / "model.safetensors").rename(tmp_path / "aside")
        os.kill(server.core, signal.SIGKILL)
        found = list(chunks)
    assert found[-1] == "[DONE]" and isinstance(found[-2], dict)
    assert found[-2]["error"]["code"] == 503 and "is not back" in found[-2]["error"]["message"]
    server.end_cleanly()


def test_resumption_can_be_turned_off(start: Start) -> None:
    """A stream ends with an error then. What nobody has seen anything of is answered all the same."""
    server = start("--no-resume-requests")
    server.until_healthy()
    expected = server.complete(max_tokens=LENGTH)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool, server.streaming(max_tokens=8000) as chunks:
        hidden = pool.submit(server.complete, max_tokens=LENGTH)
        eventually("both run", lambda: server.metrics()["num_requests_running"] == 2)
        next(chunks)
        os.kill(server.core, signal.SIGKILL)
        found = list(chunks)
        assert hidden.result()["choices"][0]["text"] == expected
    assert found[-1] == "[DONE]" and joined(found[:-2])
    assert isinstance(found[-2], dict) and found[-2]["error"]["code"] == 503
    assert "died" in found[-2]["error"]["message"]
    assert server.metrics()["request_resumed_total"] == 0
    server.end_cleanly()
