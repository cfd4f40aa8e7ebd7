"""Tests of LoRA adapters of a running server: every process answers by their names; they are loaded and
unloaded at runtime."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serve_process import PATIENCE_S, Start, eventually, greedy
from tiny_adapter import write_adapter, write_adapter_with_tokens
from tiny_text import TextModel

SLOTS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "64", "--lora-extra-vocab-size", "256")


@pytest.fixture(scope="module")
def adapters(tiny: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model = json.loads((tiny.path / "config.json").read_text())
    for seed, name in enumerate("abc", 1):
        write_adapter(folder / name, model, seed)
    return folder


def test_adapters_are_served_loaded_and_unloaded_in_all_processes(
    start: Start, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    modules = f"customer-support={adapters}/a", json.dumps({"name": "finance", "path": f"{adapters}/b"})
    server = start(*SLOTS, "--lora-modules", *modules, "--api-server-count", "2")
    server.until_healthy(2)
    answers = {
        name: server.complete(model=name, max_tokens=12)["choices"][0]["text"]
        for name in ("tiny", "customer-support", "finance")
    }
    assert len(set(answers.values())) == 3

    def fresh(model: str) -> int:
        """Return the status of a request on a new connection, answered by any process."""
        return httpx.post(
            f"{server.url}/v1/completions", json=greedy(model=model, max_tokens=2), timeout=PATIENCE_S
        ).status_code

    change = {"lora_name": "late", "lora_path": f"{adapters}/c"}
    assert server.client.post("/v1/load_lora_adapter", json=change).status_code == 200
    assert {fresh("late") for _ in range(6)} == {200}
    with server.streaming(model="late", max_tokens=600) as stream, ThreadPoolExecutor() as threads:
        stream_events = [next(stream)]
        gone = threads.submit(server.client.post, "/v1/unload_lora_adapter", json={"lora_name": "late"})
        eventually("the adapter is no longer served", lambda: fresh("late") == 404)
        assert {fresh("late") for _ in range(6)} == {404}
        stream_events += stream
        assert gone.result(PATIENCE_S).status_code == 200
    assert stream_events[-1] == "[DONE]" and isinstance(last := stream_events[-2], dict)
    assert last["choices"][0]["finish_reason"] == "length"
    eventually("no request runs", lambda: server.metrics()["num_requests_running"] == 0)
    server.end_cleanly()


def test_unreadable_adapter_ends_the_start(start: Start, adapters: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(adapters / "a", tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    server = start(*SLOTS, "--lora-modules", f"one={broken}")
    assert server.exit_code() == 1, server.text()
    assert f"lora_modules: 'one' from '{broken}'" in server.text()


def test_added_tokens_of_an_adapter_are_its_own(
    start: Start, tiny: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    new = [f"<new-{number}>" for number in range(9)]
    write_adapter_with_tokens(tmp_path / "own", tiny.path, new)
    write_adapter_with_tokens(tmp_path / "many", tiny.path, [f"<many-{number}>" for number in range(40)])
    server = start("--enable-lora", "--lora-extra-vocab-size", "16", "--lora-modules", f"own={tmp_path}/own")
    server.until_healthy()

    def ids(model: str) -> list[int]:
        reply = server.client.post("/tokenize", json={"model": model, "prompt": "a<new-8>"})
        token_ids: list[int] = reply.json()["tokens"]
        return token_ids

    last = ids("own")[-1]
    assert last >= 344 and len(ids("own")) < len(ids("tiny")) and max(ids("tiny")) < 344
    reply_body = server.complete(
        model="own", prompt="a<new-8>", max_tokens=3, logit_bias={str(last): 100}, logprobs=1
    )["choices"][0]
    assert reply_body["text"] == "<new-8>" * 3 and reply_body["logprobs"]["tokens"] == ["<new-8>"] * 3
    for model, prompt in (("tiny", [5, last]), ("own", [5, last + 1]), ("own", [5, last + 100])):
        refused = server.client.post("/v1/completions", json=greedy(model=model, prompt=prompt))
        assert refused.status_code == 400 and "out of vocabulary" in refused.text, refused.text
    many = {"lora_name": "many", "lora_path": f"{tmp_path}/many"}
    refused = server.client.post("/v1/load_lora_adapter", json=many)
    assert refused.status_code == 400 and "36 tokens of its own, above the 16" in refused.text, refused.text
    again = {"lora_name": "own", "lora_path": f"{tmp_path}/own", "load_inplace": True}
    assert server.client.post("/v1/load_lora_adapter", json=again).status_code == 200
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "own"}).status_code == 200
    assert server.client.post("/v1/load_lora_adapter", json=again).status_code == 200
    assert ids("own")[-1] == last
    server.end_cleanly()
