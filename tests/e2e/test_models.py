"""Tests of several models in one server, each in processes of its own: swaps under a memory budget, crashes,
failures, operators."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from oracle import make_tiny
from preloaded import Preloaded
from serve_process import PATIENCE_S, ServeProcess, eventually, samples
from tiny_text import EOS, IM_END, VOCAB, TextModel

NAMES = ("a", "b", "c")
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "256"),
    "--disable-uvicorn-access-log",
)
TWO_MODELS_GB = 0.008
"""Memory budget for any two of the models, which take 2.1, 3.3 and 4.4 MB, but not for all three."""


@pytest.fixture(scope="module")
def models(tiny: TextModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three models with one, two and three layers."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for num_layers, name in enumerate(NAMES, 1):
        path, _ = make_tiny("llama", folder / name, vocab_size=VOCAB, num_hidden_layers=num_layers)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (path / file).write_bytes((tiny.path / file).read_bytes())
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END]}))
        made[name] = path
    return made


@contextmanager
def serving(
    folder: Path, preloaded: Preloaded, entries: Sequence[dict[str, Any]], *flags: str
) -> Iterator[ServeProcess]:
    """Start a server with these models, and wait until it is healthy."""
    file = folder / "models.yaml"
    file.write_text(json.dumps(entries))  # JSON is YAML
    words = ("--models-config", str(file), *FLAGS, *flags)
    with ServeProcess(None, *words, log=folder / "log", preloaded=preloaded) as server:
        server.until_healthy()
        yield server


def entries_of(models: dict[str, Path]) -> list[dict[str, Any]]:
    return [{"model": str(path), "served-model-name": name} for name, path in models.items()]


def states(server: ServeProcess) -> dict[str, str]:
    cards = server.client.get("/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def complete(server: ServeProcess) -> httpx.Response:
    return server.client.post("/v1/completions", json=body_of("a", 1))


def body_of(name: str, number: int) -> dict[str, Any]:
    """Return a completion body that depends only on its number; it is greedy or has a seed."""
    prompt = f"The quick brown fox {number % 50} jumps"
    sampling = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number % 50}
    rest = {"max_tokens": 4 + number % 12, "ignore_eos": True}
    return {"model": name, "prompt": prompt, "return_token_ids": True, **sampling, **rest}


def answers(server: ServeProcess, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Send all requests, 16 at a time, and return the token ids of each answer."""

    def one(body: dict[str, Any]) -> Any:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(one, bodies))


def alone(folder: Path, preloaded: Preloaded, path: Path, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the answers of a server with one model."""
    log = folder / f"alone-{path.parent.name}"
    name = ("--served-model-name", bodies[0]["model"])
    with ServeProcess(str(path), *FLAGS, *name, log=log, preloaded=preloaded) as server:
        server.until_healthy()
        return answers(server, bodies)


def check_mixed_requests(
    count: int, folder: Path, preloaded: Preloaded, models: dict[str, Path], compared: Sequence[str]
) -> None:
    """Send mixed requests under a budget for two models. Check the answers of the models in `compared`
    against those of a server with that model alone."""
    chance = random.Random(count)
    bodies = [body_of(chance.choice(NAMES), number) for number in range(count)]
    budget = ("--models-memory-gb", str(TWO_MODELS_GB))
    with serving(folder, preloaded, entries_of(models), *budget) as server:
        assert states(server) == {"a": "awake", "b": "awake", "c": "unloaded"}
        mixed = answers(server, bodies)
        assert sorted(states(server).values()) == ["asleep", "awake", "awake"]
        finished = Counter[str]()
        for name, labels, value in samples(server.client.get("/metrics").text):
            if name == "vllm:request_success_total":
                finished[labels["model_name"]] += int(value)
        assert finished == Counter(body["model"] for body in bodies)
        server.end_cleanly()
    for name in compared:
        chosen = [number for number, body in enumerate(bodies) if body["model"] == name]
        single = alone(folder, preloaded, models[name], [bodies[number] for number in chosen])
        assert [mixed[number] for number in chosen] == single


def test_mixed_requests_under_a_budget_for_two(
    tmp_path: Path, preloaded: Preloaded, models: dict[str, Path]
) -> None:
    check_mixed_requests(24, tmp_path, preloaded, models, compared="c")


@pytest.mark.slow
def test_many_mixed_requests_under_a_budget_for_two(
    tmp_path: Path, preloaded: Preloaded, models: dict[str, Path]
) -> None:
    check_mixed_requests(500, tmp_path, preloaded, models, compared=NAMES)


def test_crashes_and_failures_stay_with_their_model(
    tmp_path: Path, preloaded: Preloaded, models: dict[str, Path]
) -> None:
    """A model with broken weights answers with its error. A killed core that was awake is restarted; the
    operator unloads and loads."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in models["b"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "op", "key": "o", "operator": True}]}))
    entries = [*entries_of({"a": models["a"], "b": broken})]
    with serving(tmp_path, preloaded, entries, "--api-key", str(keys)) as server:
        server.client.headers["authorization"] = "Bearer o"
        assert states(server) == {"a": "awake", "b": "failed"}
        reply = server.client.post("/v1/completions", json=body_of("b", 1))
        assert reply.status_code == 503 and "could not be loaded" in reply.json()["error"]["message"]
        assert server.client.get("/health?model=b").status_code == 503 and server.health() == 200
        first = complete(server)
        os.kill(server.core, signal.SIGKILL)
        eventually("the core is back", lambda: complete(server).status_code == 200)  # 503 while it restarts
        assert complete(server).json()["choices"] == first.json()["choices"]
        reply = server.client.post("/v1/models/unload", json={"model": "a"})
        assert reply.json() == {"model": "a", "state": "unloaded"}
        eventually("no core is left", lambda: not server.with_role("EngineCore"))
        assert complete(server).json()["choices"] == first.json()["choices"]
        assert states(server)["a"] == "awake"
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.exit_code() == 0
