"""Tests of several models behind one address: choice of a model, states, operators, health and metrics."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, application_of, client_of
from fake_backend import Backend
from fake_engine import FakeEngine, FakeFacts
from prometheus_client.core import GaugeMetricFamily

from quire.config.env import Env
from quire.errors import EngineDead, EngineError
from quire.frontend.model_pool import ModelPool, PoolModel
from quire.memory import ModelMemory
from quire.server.app import Application
from quire.server.settings import make_settings
from quire.server.several_models import ServedModel, models_app

TIMEOUT_S = 60


class Several:
    """A server with the models `a` (also `first`) and `b`, of which one can be awake at a time."""

    def __init__(self, budget: int = 10, env: dict[str, str] | None = None, **settings: Any) -> None:
        made = make_settings(settings, env=Env.read(env or {}))
        self.engines = {"a": FakeEngine("from a"), "b": FakeEngine("from b")}
        self.engines["a"].facts = FakeFacts(model_names=("a", "first"), root="models/a")
        self.engines["b"].facts = FakeFacts(model_names=("b",), root="models/b")
        self.engines["b"].operation.settings["lora"] = {"enable_lora": True}
        self.engines["b"].inputs.enable_lora = True
        self.backends = {name: Backend() for name in self.engines}
        served = [
            ServedModel(
                Application(engine, made) if env or settings else application_of(engine, {}),
                PoolModel(name, self.backends[name], ModelMemory(4, 10)),
            )
            for name, engine in self.engines.items()
        ]
        self.pool = ModelPool([model.pool_model for model in served], budget_bytes=budget)
        self.applications = [model.application for model in served]
        self.app = models_app(served, self.pool, made)

    @asynccontextmanager
    async def client(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        self.pool.start()
        async with asyncio.timeout(TIMEOUT_S), client_of(self.app, headers=headers) as client:
            await self.pool.started.wait()
            yield client
            assert all(not model.num_users for model in self.pool.models.values())
            await self.pool.close()


async def complete(client: httpx.AsyncClient, **body: Any) -> Any:
    return (await client.post(COMPLETIONS, json={"prompt": "x", **body})).json()


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    cards = (await client.get("/v1/models")).json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


async def test_model_in_the_body_chooses() -> None:
    several = Several()
    async with several.client() as client:
        assert await states(client) == {"a": "awake", "first": "awake", "b": "unloaded"}
        for name, text in (("a", "from a"), ("b", "from b"), ("first", "from a"), (None, "from a")):
            reply = await complete(client, model=name)
            assert reply["choices"][0]["text"] == text and reply["model"] == text[-1]
        reply = await client.post(CHAT, json={"model": "b", "messages": MESSAGES, "stream": True})
        assert reply.text.endswith("data: [DONE]\n\n") and '"model":"b"' in reply.text
        message = {"model": "b", "max_tokens": 5, "messages": MESSAGES}
        assert (await client.post("/v1/messages", json=message)).json()["model"] == "b"
        assert await states(client) == {"a": "asleep", "first": "asleep", "b": "awake"}


async def test_unknown_model_is_404_with_the_known_ones() -> None:
    several = Several()
    async with several.client() as client:
        for reply in (
            await client.post(COMPLETIONS, json={"model": "c", "prompt": "x"}),
            await client.get("/v1/models/c"),
            await client.get("/health?model=c"),
        ):
            assert reply.status_code == 404
            error = reply.json()["error"]
            assert error["message"] == "The model `c` does not exist. This server has: a, first, b."
            assert error["param"] == "model"
        reply = await client.post("/v1/messages", json={"model": "c", "max_tokens": 5, "messages": MESSAGES})
        assert reply.status_code == 404 and reply.json()["type"] == "error"
    assert several.backends["b"].calls == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"model": 3, "prompt": "x"}', b'{"prompt": {}}', b'"\\ud800"', b"\xff" * (2 << 20)],
)
async def test_invalid_bodies_are_reported_as_by_a_single_model(content: bytes) -> None:
    several, json_type = Several(), {"content-type": "application/json"}
    async with several.client() as client, client_of(several.applications[0].asgi) as single:
        reply = await client.post(COMPLETIONS, content=content, headers=json_type)
        expected = await single.post(COMPLETIONS, content=content, headers=json_type)
    assert reply.status_code == expected.status_code == 400
    assert reply.json() == expected.json()


async def test_frontend_routes_need_no_engine() -> None:
    several = Several()
    async with several.client() as client:
        reply = await client.post("/tokenize", json={"model": "b", "prompt": "abc"})
        assert reply.json()["count"] == 3
        assert (await client.post("/v1/nothing", json={"model": "b"})).status_code == 404
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
    assert several.backends["b"].calls == []


async def test_form_of_an_audio_request_names_its_model() -> None:
    several = Several()
    async with several.client() as client:
        files = {"file": ("a.wav", b"no sound")}
        path = "/v1/audio/transcriptions"
        reply = await client.post(path, data={"model": "c"}, files=files)
        assert reply.status_code == 404 and "This server has" in reply.text
        reply = await client.post(path, data={"model": "b"}, files=files)
        assert reply.status_code >= 400 and "This server has" not in reply.text
    assert several.backends["b"].calls[0] == "load"


async def test_adapters_belong_to_their_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("weights")
    several = Several(env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, lora_roots=[str(tmp_path)])
    async with several.client() as client:
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        reply = await client.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == 200, reply.text
        reply = await complete(client, model="x")
        assert reply["model"] == "x" and reply["choices"][0]["text"] == "from b"
        card = (await client.get("/v1/models/x")).json()
        assert card["parent"] == "b" and card["status"]["value"] == "awake"
        reply = await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        assert reply.status_code == 200
        assert (await client.get("/v1/models/x")).status_code == 404
    assert several.engines["b"].loras[-1].lora_name == "x"  # type: ignore[union-attr]


def keys_file(folder: Path) -> str:
    file = folder / "keys.json"
    entries = [{"name": "op", "key": "o", "operator": True}, {"name": "user", "key": "u"}]
    file.write_text(json.dumps({"keys": entries}))
    return str(file)


async def test_operator_loads_and_unloads(tmp_path: Path) -> None:
    several = Several(budget=20, api_key=[keys_file(tmp_path)])
    async with several.client() as client:
        body, operator = {"model": "first"}, {"authorization": "Bearer o"}
        for path in ("/v1/models/load", "/v1/models/unload"):
            assert (await client.post(path, json=body)).status_code == 401
            reply = await client.post(path, json=body, headers={"authorization": "Bearer u"})
            assert reply.status_code == 403 and "operator: true" in reply.json()["error"]["message"]
        reply = await client.post("/v1/models/unload", json=body, headers=operator)
        assert reply.json() == {"model": "a", "state": "unloaded"}
        reply = await client.post("/v1/models/load", json=body, headers=operator)
        assert reply.json() == {"model": "a", "state": "awake"}
        reply = await client.post("/v1/models/load", json={"model": "c"}, headers=operator)
        assert reply.status_code == 404
    assert several.backends["a"].calls == ["load", "unload", "load", "unload"]


@pytest.mark.parametrize(("env", "status"), [({}, 403), ({"VLLM_SERVER_DEV_MODE": "1"}, 200)])
async def test_loading_without_keys_needs_developer_mode(env: dict[str, str], status: int) -> None:
    several = Several(env=env)
    async with several.client() as client:
        assert (await client.post("/v1/models/load", json={"model": "b"})).status_code == status
        assert (await client.post("/sleep")).status_code == 400


async def test_failed_model_does_not_affect_other_models() -> None:
    several = Several(budget=20)
    several.backends["b"].error = EngineError("its weights are broken")
    async with several.client() as client:
        reply = await client.post(COMPLETIONS, json={"model": "b", "prompt": "x"})
        assert reply.status_code == 503 and "its weights are broken" in reply.json()["error"]["message"]
        assert (await complete(client, model="a"))["choices"][0]["text"] == "from a"
        card = (await client.get("/v1/models/b")).json()
        assert card["status"]["value"] == "failed" and card["status"]["error"] == "its weights are broken"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health?model=a")).status_code == 200
        assert (await client.get("/health?model=b")).status_code == 503
        several.backends["a"].problem = EngineDead("it hangs")
        for path in ("/health", "/ping"):
            reply = await client.get(path)
            assert reply.status_code == 503 and "it hangs" in reply.text


async def test_request_waits_in_line_for_its_model() -> None:
    """A request for a sleeping model waits until the running one of another model has ended."""
    several = Several()
    several.engines["a"].step_s = 0.01
    async with several.client() as client:
        first = asyncio.create_task(complete(client, model="a"))
        while several.engines["a"].num_in_flight == 0:
            await asyncio.sleep(0)
        second = asyncio.create_task(complete(client, model="b"))
        while several.pool.models["a"].state != "leaving":
            await asyncio.sleep(0)
        assert not several.backends["b"].is_loaded and several.engines["a"].num_in_flight == 1
        third = asyncio.create_task(complete(client, model="a"))
        texts = [(await task)["choices"][0]["text"] for task in (first, second, third)]
        assert texts == ["from a", "from b", "from a"]
    assert several.backends["a"].calls == ["load", "sleep 1", "wake_up", "unload"]


async def test_metrics_of_several_models_are_one_family_each() -> None:
    def of_model(name: str) -> list[GaugeMetricFamily]:
        labelled = GaugeMetricFamily("vllm:running", "Running.", labels=["model_name"])
        labelled.add_metric([name], 1)
        return [labelled, GaugeMetricFamily("vllm:info", "Info.", value=1)]

    several = Several()
    shared = [GaugeMetricFamily("http", "Shared.", value=3)]
    for name, engine in several.engines.items():
        metrics = partial(SimpleNamespace, of_server=lambda: shared)
        engine.metrics = metrics(model_name=name, of_engines=partial(of_model, name))  # type: ignore[attr-defined]
    async with several.client() as client:
        text = (await client.get("/metrics")).text
    assert text.count("# TYPE vllm:running gauge") == text.count("# TYPE vllm:info gauge") == 1
    for series in ("running", "info"):
        for name in "ab":
            assert f'vllm:{series}{{model_name="{name}"}} 1.0' in text
    assert "\nhttp 3.0\n" in text
