"""Adapters of a running server: answered by name in every process, loaded and unloaded under way."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serve_process import PATIENCE_S, Start, eventually, greedy
from tiny_adapter import write_adapter
from tiny_text import TextModel

SLOTS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "64", "--lora-extra-vocab-size", "256")


@pytest.fixture(scope="module")
def adapters(tiny: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model = json.loads((tiny.path / "config.json").read_text())
    for seed, name in enumerate("abc", 1):
        write_adapter(folder / name, model, seed)
    return folder


def test_adapters_answer_come_and_go_in_all_processes(
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
        """By whichever process."""
        return httpx.post(
            f"{server.url}/v1/completions", json=greedy(model=model, max_tokens=2), timeout=PATIENCE_S
        ).status_code

    change = {"lora_name": "late", "lora_path": f"{adapters}/c"}
    assert server.client.post("/v1/load_lora_adapter", json=change).status_code == 200
    assert {fresh("late") for _ in range(6)} == {200}
    with server.streaming(model="late", max_tokens=600) as stream, ThreadPoolExecutor() as threads:
        found = [next(stream)]
        gone = threads.submit(server.client.post, "/v1/unload_lora_adapter", json={"lora_name": "late"})
        eventually("nobody gets it any more", lambda: fresh("late") == 404)
        assert {fresh("late") for _ in range(6)} == {404}
        found += stream
        assert gone.result(PATIENCE_S).status_code == 200
    assert found[-1] == "[DONE]" and isinstance(last := found[-2], dict)
    assert last["choices"][0]["finish_reason"] == "length"
    eventually("nothing runs", lambda: server.metrics()["num_requests_running"] == 0)
    server.end_cleanly()


def test_an_adapter_that_cannot_be_read_ends_the_start(start: Start, adapters: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(adapters / "a", tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    server = start(*SLOTS, "--lora-modules", f"one={broken}")
    assert server.exit_code() == 1, server.text()
    assert f"lora_modules: 'one' from '{broken}'" in server.text()
