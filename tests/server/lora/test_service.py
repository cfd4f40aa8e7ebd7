"""Tests of LoRA adapters over HTTP: requests by adapter name, loading within the allowed roots,
unloading."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec
import httpx
import msgspec
import pytest
from ask import CHAT, COMPLETIONS, EMBEDDER, MESSAGES, client_of, refused, until
from fake_engine import FakeEngine
from starlette.requests import Request
from tokenizers import Tokenizer

from quire.config.env import Env
from quire.data.lora import LoRARequest
from quire.errors import ConfigError, EngineDead, RequestError
from quire.frontend.inputs import InputProcessor
from quire.server.app import Application
from quire.server.http.errors import NotFound
from quire.server.lora import resolver
from quire.server.lora.locations import LoRALocations
from quire.server.lora.modules import LoRAModule, check_modules, read_modules
from quire.server.lora.registry import LoRARegistry
from quire.server.settings import make_settings

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHANGES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
TIMEOUT_S = 60


def adapter(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(content)
    (folder / "adapter_model.safetensors").write_text("weights")
    return folder


def lora_engine(**kwargs: Any) -> FakeEngine:
    engine = FakeEngine(**kwargs)
    engine.operation.settings["lora"] = {"enable_lora": True}
    engine.inputs.enable_lora = True
    return engine


@asynccontextmanager
async def lora_client(
    engine: FakeEngine,
    settings: dict[str, Any] | None = None,
    env: dict[str, str] = CHANGES,
    registry: LoRARegistry | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    application = Application(engine, make_settings(settings or {}, env=Env.read(env)), registry=registry)
    await application.api.adapters.load_all()
    async with client_of(application.asgi, timeout=TIMEOUT_S) as client:
        yield client
    assert not application.api.adapters._users, "a request still holds its adapter"


# ---- the command line


def test_lora_modules_are_parsed_in_every_form() -> None:
    modules = read_modules(["a=./x", '{"name": "b", "path": "/y=z", "base_model_name": "m"}', "c=s3://k/v"])
    assert modules == (LoRAModule("a", "./x"), LoRAModule("b", "/y=z", base="m"), LoRAModule("c", "s3://k/v"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a"], "name=path"),
        (["=x"], "1 to 256 characters"),
        (["a="], "name=path"),
        (["a=x", "a=y"], "two adapters"),
        (["{nope"], "not valid JSON"),
        (['{"name": "a"}'], "`name` and `path`"),
        (['{"name": "a", "path": 1}'], "path must be a string"),
        (['{"name": "a", "path": "x", "rank": 1}'], "unknown field 'rank'"),
        (["a\tb=x"], "printable"),
    ],
)
def test_invalid_lora_modules_are_refused(values: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_settings({"lora_modules": values})


def test_lora_modules_need_enable_lora_and_unique_names(tmp_path: Path) -> None:
    modules = read_modules(["a=x"])
    with pytest.raises(ConfigError, match="needs enable_lora"):
        check_modules(modules, enabled=False, served=["m"])
    with pytest.raises(ConfigError, match="'a' is the name of the model"):
        check_modules(modules, enabled=True, served=["m", "a"])
    with pytest.raises(ConfigError, match=f"'{tmp_path}/none': there is no adapter_config.json"):
        Application(lora_engine(), make_settings({"lora_modules": [f"a={tmp_path}/none"]}))


# ---- requests


async def test_every_route_accepts_an_adapter_name(tmp_path: Path) -> None:
    engine, path = lora_engine(answer="Hi"), adapter(tmp_path / "a")
    chat, plain = {"messages": MESSAGES}, {"prompt": "ab"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat),
        (CHAT, chat | {"use_beam_search": True, "n": 2, "max_tokens": 2}),
        (COMPLETIONS, plain),
        ("/v1/messages", chat | {"max_tokens": 4}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES]}),
        ("/invocations", plain),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
        ("/v1/completions/render", plain),
        ("/tokenize", plain),
    ]
    async with lora_client(engine, {"lora_modules": [f"sup/port={path}"]}) as client:
        for route, body in bodies:
            num_before = len(engine.loras)
            reply = await client.post(route, json=body | {"model": "sup/port"})
            assert reply.status_code == 200, reply.text
            answer = reply.json()[0] if route.endswith("render") else reply.json()
            assert answer.get("model", "sup/port") == "sup/port"
            assert {lora and lora.lora_path for lora in engine.loras[num_before:]} <= {str(path)}
            assert len(engine.loras) > num_before or route in ("/v1/completions/render", "/tokenize")
        reply = await client.post(CHAT, json=chat | {"model": "also-fake"})
        assert reply.json()["model"] == "fake" and engine.loras[-1] is None
        refused(await client.post(CHAT, json=chat | {"model": "support"}), 404)
        assert "as `model`" in refused(await client.post(CHAT, json=chat | {"lora_request": {}}))["message"]
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert list(cards) == ["fake", "also-fake", "sup/port"]
        assert (cards["sup/port"]["root"], cards["sup/port"]["parent"]) == (str(path), "fake")
        assert (await client.get("/v1/models/sup/port")).json() == cards["sup/port"]


async def test_pooling_models_accept_adapter_names(tmp_path: Path) -> None:
    engine, path = lora_engine(pooling=EMBEDDER), adapter(tmp_path / "a")
    async with lora_client(engine, {"lora_modules": [f"a={path}"]}) as client:
        reply = await client.post("/v1/embeddings", json={"input": ["a", "b"], "model": "a"})
        assert reply.json()["model"] == "a"
        assert [lora and lora.lora_name for lora in engine.loras] == ["a", "a"]


# ---- loading and unloading


async def test_adapters_are_loaded_and_unloaded_within_allowed_roots(tmp_path: Path) -> None:
    good, broken = adapter(tmp_path / "in/good"), adapter(tmp_path / "in/broken", "")
    outside = adapter(tmp_path / "out/a")
    (tmp_path / "in/link").symlink_to(outside)
    linked = adapter(tmp_path / "in/linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    circle = adapter(tmp_path / "in/circle")
    (circle / "adapter_model.safetensors").unlink()
    (circle / "adapter_model.safetensors").symlink_to("adapter_model.safetensors")
    inside = str(tmp_path / "in")
    engine = lora_engine()
    async with lora_client(engine, {"lora_roots": [inside]}) as client:

        async def load(path: object, name: object = "x", **fields: Any) -> httpx.Response:
            return await client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **fields})

        done = await load(good)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert engine.adapters["x"].within == (inside,), "links that are created later"
        assert done.headers["content-type"].startswith("text/plain")
        again = refused(await load(good))
        assert again["type"] == "InvalidUserInput" and "already been loaded" in again["message"]
        assert (await load(good, load_inplace=True)).status_code == 200
        for location in (
            outside,
            f"{inside}/../out/a",
            f"{inside}/link",
            linked,
            "/",
            "~",
            "s3://k/a",
            "file:///",
        ):
            assert refused(await load(location, "y"), 403)["type"] == "PermissionDeniedError"
        for location in (f"{inside}/none", inside, f"{inside}/a\0b", f"{inside}/{'a' * 5000}", circle):
            message = refused(await load(location, "y"), 404)["message"]
            assert message.startswith("Loading lora y failed: No adapter found for")
        assert "q_proj.lora_A" in refused(await load(broken, "y"))["message"]
        for name in ("", "fake", "a" * 257, "a\n"):
            assert refused(await load(good, name))["type"] == "InvalidUserInput"
        for body in ({}, {"lora_name": "y"}, {"lora_path": inside}):
            assert refused(await client.post(LOAD, json=body))["type"] == "InvalidUserInput"
        for body in ({"lora_name": 1}, {"lora_name": "y", "lora_path": ["a"]}, []):
            refused(await client.post(LOAD, json=body))
        for name, status in (("x", 200), ("x", 404), ("../x", 404), ("fake", 404)):
            gone = await client.post(UNLOAD, json={"lora_name": name})
            assert gone.status_code == status
        assert refused(await client.post(UNLOAD, json={}))["type"] == "InvalidUserInput"
        assert refused(gone, 404)["message"] == "The lora adapter 'fake' cannot be found."
    assert not engine.adapters


async def test_runtime_loading_needs_permission() -> None:
    async with lora_client(lora_engine(), env={}) as client:
        for path in (LOAD, UNLOAD):
            message = refused(await client.post(path, json={}), 404)["message"]
            assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in message
    async with lora_client(FakeEngine()) as client:
        body = {"lora_name": "a", "lora_path": "/a"}
        assert "--enable-lora" in refused(await client.post(LOAD, json=body))["message"]
    async with lora_client(lora_engine(), {"api_key": ["secret"]}) as client:
        for route in (LOAD, UNLOAD):
            assert (await client.post(route, json={})).status_code == 401


async def test_unloading_waits_for_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    engine, path = lora_engine(answer="x" * 50), adapter(tmp_path / "a")
    body = {"prompt": "ab", "model": "a", "max_tokens": 50}
    async with lora_client(engine, {"lora_modules": [f"a={path}"]}) as client:
        engine.step_s = 0.02
        answering = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await until(lambda: engine.num_in_flight == 1)
        leaving = asyncio.create_task(client.post(UNLOAD, json={"lora_name": "a"}))
        while (await client.get("/v1/models/a")).status_code != 404:
            await asyncio.sleep(0.01)
        refused(await client.post(COMPLETIONS, json=body), 404)
        refused(await client.post(UNLOAD, json={"lora_name": "a"}), 404)
        loading = asyncio.create_task(client.post(LOAD, json={"lora_name": "a", "lora_path": str(path)}))
        assert (await answering).json()["choices"][0]["text"] == "x" * 50
        assert (await leaving).status_code == 200
        assert engine.removals == [("a", 0)]
        assert (await loading).status_code == 200 and list(engine.adapters) == ["a"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "logprobs": True}),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 4, "stream": True, "logprobs": True}),
        (COMPLETIONS, {"prompt": ["ab", "cd"], "logprobs": 1, "echo": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
        ("/tokenize", {"messages": MESSAGES}),
        (f"{CHAT}/render", {"messages": MESSAGES}),
    ],
)
async def test_adapter_of_a_request_is_looked_up_once(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every lookup reads the state of three files of the adapter's tokenizer."""
    lookups, look_up = [], InputProcessor.tokenizer_of

    def count(inputs: InputProcessor, lora: LoRARequest | None) -> Any:
        lookups.append(lora)
        return look_up(inputs, lora)

    monkeypatch.setattr(InputProcessor, "tokenizer_of", count)
    async with lora_client(lora_engine(), {"lora_modules": [f"a={adapter(tmp_path / 'a')}"]}) as client:
        assert (await client.post(path, json=body | {"model": "a"})).status_code == 200
    assert len(lookups) == 1


async def test_requests_of_a_leaving_adapter_keep_its_tokenizer(tmp_path: Path) -> None:
    engine, path = lora_engine(), adapter(tmp_path / "a")
    engine.inputs.enable_lora, engine.inputs.num_extra_vocab = True, 16
    backend = Tokenizer.from_str(engine.tokenizer.backend.to_str())
    backend.add_tokens(["<new>"])
    backend.save(str(path / "tokenizer.json"))
    module = LoRAModule("a", str(path), str(path))
    registry = LoRARegistry(modules=[module])
    api = Application(engine, make_settings({}, env=Env.read(CHANGES)), registry=registry).api
    model = await api.names.find("a", Request({"type": "http"}))
    registry.put(msgspec.structs.replace(module, is_unloading=True))
    assert api.adapters.get("a") is None and api.adapters.hold("a", {}) is None
    tokenizer = model.tokenizer
    assert tokenizer is not None and tokenizer.backend.token_to_id("<new>") == backend.token_to_id("<new>")


async def test_failed_removal_keeps_the_adapter(tmp_path: Path) -> None:
    engine, path = lora_engine(), adapter(tmp_path / "a")
    async with lora_client(engine, {"lora_modules": [f"a={path}"]}) as client:
        engine.removal_error = EngineDead("a core is gone")
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 503
        assert (await client.get("/v1/models/a")).status_code == 200
        engine.removal_error = None
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 200
        refused(await client.get("/v1/models/a"), 404)


async def test_process_that_dies_while_unloading_leaves_no_name(tmp_path: Path) -> None:
    """Otherwise another process would take the name for one that is still leaving, forever."""
    file, folder = tmp_path / "roster", tmp_path / "customers"
    path = adapter(folder / "acme")
    LoRARegistry.create(file, [LoRAModule("acme", str(path), str(path), is_unloading=True)])
    env = CHANGES | {"VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)}
    async with lora_client(lora_engine(), env=env, registry=LoRARegistry(file)) as client:
        reply = await client.post(COMPLETIONS, json={"prompt": "ab", "model": "acme"})
        assert reply.status_code == 200, reply.text


async def test_concurrent_loads_load_an_adapter_once(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    async with lora_client(lora_engine(step_s=0.01), {"lora_roots": [str(tmp_path)]}) as client:
        body = {"lora_name": "x", "lora_path": str(path)}
        replies = await asyncio.gather(*(client.post(LOAD, json=body) for _ in range(8)))
        assert sorted(reply.status_code for reply in replies) == [200, *[400] * 7]


async def test_processes_share_one_registry(tmp_path: Path) -> None:
    """Adapters that one API process loads or unloads change for the others at once."""
    file = tmp_path / "roster"
    LoRARegistry.create(file, [LoRAModule("a", "x", "/x")])
    one, other = LoRARegistry(file), LoRARegistry(file)
    assert list(other.all()) == ["a"] and not other.is_loaded
    one.put(LoRAModule("b", "y", "/y"))
    assert list(other.all()) == ["a", "b"]
    assert other.drop("a") == LoRAModule("a", "x", "/x") and other.drop("a") is None
    assert list(one.all()) == ["b"]
    one.mark_loaded()
    assert other.is_loaded

    order = []

    async def change(registry: LoRARegistry, name: str) -> None:
        async with registry.locked("b"):
            order.append(name)
            await asyncio.sleep(0.1)
            order.append(name)

    await asyncio.gather(change(one, "one"), change(other, "other"))
    assert order[0] == order[1] and order[2] == order[3]


# ---- resolved by name


async def test_adapters_are_resolved_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "customers"
    adapter(folder / "acme"), adapter(folder / "broken", ""), adapter(tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "empty").mkdir()
    engine = lora_engine()
    async with lora_client(engine, env=CHANGES | {"VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)}) as client:

        async def ask(name: str) -> httpx.Response:
            return await client.post(COMPLETIONS, json={"prompt": "ab", "model": name})

        assert {reply.json()["model"] for reply in await asyncio.gather(*map(ask, ["acme"] * 4))} == {"acme"}
        strange = (
            "none",
            "empty",
            "link",
            ".",
            "..",
            "../secret",
            "acme/../acme",
            "/",
            "a\0b",
            "ż" * 300,
            "\\",
        )
        for name in strange:
            refused(await ask(name), 404)
        for _ in range(2):
            assert "q_proj" in refused(await ask("broken"))["message"]
        adapter(folder / "late")
        assert (await ask("late")).status_code == 200
        assert (await client.post(UNLOAD, json={"lora_name": "acme"})).status_code == 200
    assert list(engine.adapters) == ["late"]
    assert str(folder.resolve()) in engine.adapters["late"].within, "links that are created later"


async def test_hub_adapters_are_resolved_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path / "a")

    def fetch(repo: str, check: Callable[[int], None]) -> Path:
        check(5000 if repo == "org/large" else 10)
        return path

    monkeypatch.setattr("quire.server.lora.locations.fetch_adapter", fetch)
    settings = {"lora_resolver_hub": ["org/*", "me/one"], "lora_max_download_bytes": 4000}
    async with lora_client(lora_engine(), settings) as client:
        for name, status in (("org/any", 200), ("me/one", 200), ("me/two", 404), ("org", 404)):
            reply = await client.post(COMPLETIONS, json={"prompt": "ab", "model": name})
            assert reply.status_code == status, reply.text
        large = await client.post(LOAD, json={"lora_name": "x", "lora_path": "org/large"})
        assert "--lora-max-download-bytes" in refused(large)["message"]


async def test_adapters_at_urls_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    store = fsspec.filesystem("memory")
    for name, content in (("acme", b"weights"), ("large", b"x" * 5000)):
        store.pipe({f"/k/{name}/adapter_config.json": b"{}", f"/k/{name}/adapter_model.bin": content})
    store.pipe("/other/a/adapter_config.json", b"{}")
    engine = lora_engine()
    async with lora_client(
        engine, {"lora_resolver_dir": "memory://k/", "lora_max_download_bytes": 4000}
    ) as client:

        async def load(location: str, status: int) -> str:
            reply = await client.post(LOAD, json={"lora_name": "x", "lora_path": location})
            assert reply.status_code == status, reply.text
            return reply.text

        reply = await client.post(COMPLETIONS, json={"prompt": "ab", "model": "acme"})
        assert reply.status_code == 200, reply.text
        refused(await client.post(COMPLETIONS, json={"prompt": "ab", "model": "none"}), 404)
        await load("memory://k/none", 404)
        for location in (
            "memory://other/a",
            "memory://k/../other/a",
            "memory://k/%2e%2e/other/a",
            "memory://k/./acme",
            "memory://k/acme?version=1",
            "memory://k/acme#part",
            "memory://kk/a",
            "zip://a::memory://k/acme",
        ):
            await load(location, 403)
        assert "--lora-max-download-bytes" in await load("memory://k/large", 400)
        await load("memory://k/acme", 200)
        store.pipe("/k/acme/adapter_model.bin", b"others!")  # the same number of bytes
        again = {"lora_name": "x", "lora_path": "memory://k/acme", "load_inplace": True}
        assert (await client.post(LOAD, json=again)).status_code == 200
    weights = {name: Path(lora.lora_path, "adapter_model.bin") for name, lora in engine.adapters.items()}
    contents = {name: file.read_bytes() for name, file in weights.items()}
    assert contents == {"acme": b"weights", "x": b"others!"}, "a changed adapter is fetched again"
    snapshots = list((tmp_path / "adapters").glob("*/snapshots/*"))
    assert len(snapshots) == 2, "the same adapter is kept once"


async def test_adapter_at_a_url_brings_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every route that encodes or decodes tokens uses it, for this adapter only."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    engine = lora_engine()
    engine.inputs.enable_lora, engine.inputs.num_extra_vocab = True, 16
    backend = Tokenizer.from_str(engine.tokenizer.backend.to_str())
    backend.add_tokens(["<new>"])
    last, plain = backend.token_to_id("<new>"), {"model": engine.facts.model_names[0]}
    store = fsspec.filesystem("memory")
    files = {"adapter_config.json": b"{}", "adapter_model.bin": b"weights"}
    files |= {"tokenizer.json": backend.to_str().encode(), "chat_template.jinja": b"<new>"}
    store.pipe({f"/own/acme/{name}": content for name, content in files.items()})
    answer = {"choices": [{"index": 0, "token_ids": [last], "finish_reason": "stop"}]}
    async with lora_client(
        engine, {"lora_resolver_dir": "memory://own/", "enable_tokenizer_info_endpoint": True}
    ) as client:

        async def post(path: str, **body: Any) -> Any:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        adapter_model = {"model": "acme"}
        assert (await post("/tokenize", **adapter_model, prompt="<new>"))["tokens"][-1] == last
        assert (await post("/tokenize", **adapter_model, messages=MESSAGES))["tokens"][-1] == last
        assert last not in (await post("/tokenize", **plain, prompt="<new>"))["tokens"]
        assert (await post("/detokenize", **adapter_model, tokens=[last])) == {"prompt": "<new>"}
        reply_body = await post(f"{COMPLETIONS}/derender", **adapter_model, generate_responses=[answer])
        assert (reply_body["model"], reply_body["choices"][0]["text"]) == ("acme", "<new>")
        chat_request = {"model": "acme", "messages": MESSAGES}
        for fields in (
            adapter_model,
            adapter_model | {"chat_request": chat_request},
            {"chat_request": chat_request},
        ):
            reply_body = await post(f"{CHAT}/derender", **fields, generate_response=answer)
            assert reply_body["choices"][0]["message"]["content"] == "<new>"
        for path, body in (
            ("/detokenize", {"tokens": [last + 16]}),
            (f"{COMPLETIONS}/derender", {"generate_responses": [answer]}),
        ):
            refused(await client.post(path, json=plain | body))
        infos = [
            (await client.get("/tokenizer_info", params=params)).json()
            for params in (adapter_model, plain, {})
        ]
        assert [str(last) in info["added_tokens_decoder"] for info in infos] == [True, False, False]
        assert infos[0]["chat_template"] == "<new>" and infos[1] == infos[2]
        refused(await client.get("/tokenizer_info", params={"model": "nobody"}), 404)
        store.pipe("/own/acme/chat_template.jinja", b"<new><new>")
        again = {"lora_name": "acme", "lora_path": "memory://own/acme", "load_inplace": True}
        assert (await client.post(LOAD, json=again)).status_code == 200
        assert (await post("/tokenize", **adapter_model, messages=MESSAGES))["tokens"][-2:] == [last, last]


def test_unreadable_url_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    places = LoRALocations(cache=tmp_path, max_bytes=1)
    with pytest.raises(ValueError, match="nope.*cannot be read"):
        places.for_operator("nope://a/b")
    with pytest.raises(NotFound, match="No adapter found for 'memory://k/none'"):
        places.for_operator("memory://k/none")


def test_failed_lookups_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    lookup = resolver.LoRAResolver(
        "memory://k", LoRALocations(roots=["memory://k"], cache=tmp_path, max_bytes=1)
    )
    assert lookup.may_find("gone") and lookup.find("gone") is None
    assert not lookup.may_find("gone")


async def test_sleeping_engine_does_not_mark_adapters_as_broken(tmp_path: Path) -> None:
    """Otherwise adapters requested meanwhile would be refused for ten seconds after."""
    engine, folder = lora_engine(), tmp_path / "customers"
    adapter(folder / "acme")
    async with lora_client(engine, env=CHANGES | {"VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)}) as client:
        body = {"prompt": "ab", "model": "acme"}
        engine.addition_error = RequestError("the engine sleeps: wake it up first")
        assert "sleeps" in refused(await client.post(COMPLETIONS, json=body))["message"]
        engine.addition_error = None
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


async def test_unresponsive_store_does_not_block_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    looks = resolver.AdapterSearch()
    assert await looks(str.upper, "a") == "A"
    monkeypatch.setattr(resolver, "SEARCH_S", 0.2)
    stuck = [looks(lambda _: never.wait(), "a") for _ in range(6)]
    results = await asyncio.gather(*stuck, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * 6
    never.set()
    monkeypatch.setattr(resolver, "SEARCH_S", TIMEOUT_S)
    assert await looks(str.upper, "b") == "B"
