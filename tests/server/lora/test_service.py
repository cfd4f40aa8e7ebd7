"""Adapters over HTTP: their names answer like models, and only what is allowed can be loaded."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from ask import CHAT, COMPLETIONS, EMBEDDER, MESSAGES, refused
from fake_engine import FakeEngine
from tokenizers import Tokenizer

from quire.config.env import Env
from quire.errors import ConfigError, EngineDead, RequestError
from quire.server.app import Application
from quire.server.http.errors import NotFound
from quire.server.lora import resolver, search
from quire.server.lora.locations import LoRALocations
from quire.server.lora.modules import LoRAModule, check_modules, read_modules
from quire.server.lora.registry import LoRARegistry
from quire.server.settings import make_settings

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHANGES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PATIENCE_S = 60
Use = Callable[[httpx.AsyncClient], Awaitable[None]]


def adapter(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(content)
    (folder / "adapter_model.safetensors").write_text("weights")
    return folder


def an_engine(**given: Any) -> FakeEngine:
    engine = FakeEngine(**given)
    engine.operation.settings["lora"] = {"enable_lora": True}
    engine.inputs.enable_lora = True
    return engine


def with_client(
    use: Use,
    engine: FakeEngine,
    settings: dict[str, Any] | None = None,
    env: dict[str, str] = CHANGES,
    registry: LoRARegistry | None = None,
) -> None:
    application = Application(engine, make_settings(settings or {}, env=Env.read(env)), registry=registry)
    transport = httpx.ASGITransport(application.asgi, raise_app_exceptions=False)

    async def go() -> None:
        await application.api.adapters.read_all()
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=PATIENCE_S
        ) as client:
            await use(client)
        assert not application.api.adapters._users, "a request still holds its adapter"

    asyncio.run(go())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


# ---- the command line


def test_modules_are_read_in_every_form() -> None:
    found = read_modules(["a=./x", '{"name": "b", "path": "/y=z", "base_model_name": "m"}', "c=s3://k/v"])
    assert found == (LoRAModule("a", "./x"), LoRAModule("b", "/y=z", base="m"), LoRAModule("c", "s3://k/v"))


@pytest.mark.parametrize(
    ("values", "said"),
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
def test_modules_that_are_none_are_refused(values: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_settings({"lora_modules": values})


def test_modules_need_adapters_and_names_of_their_own(tmp_path: Path) -> None:
    modules = read_modules(["a=x"])
    with pytest.raises(ConfigError, match="needs enable_lora"):
        check_modules(modules, enabled=False, served=["m"])
    with pytest.raises(ConfigError, match="'a' is the name of the model"):
        check_modules(modules, enabled=True, served=["m", "a"])
    with pytest.raises(ConfigError, match=f"No adapter found for '{tmp_path}/none'"):
        Application(an_engine(), make_settings({"lora_modules": [f"a={tmp_path}/none"]}))


# ---- requests


def test_every_route_answers_to_the_name_of_an_adapter(tmp_path: Path) -> None:
    engine, path = an_engine(answer="Hi"), adapter(tmp_path / "a")
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

    async def use(client: httpx.AsyncClient) -> None:
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

    with_client(use, engine, {"lora_modules": [f"sup/port={path}"]})


def test_pooling_models_have_adapters_too(tmp_path: Path) -> None:
    engine, path = an_engine(pooling=EMBEDDER), adapter(tmp_path / "a")

    async def use(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/embeddings", json={"input": ["a", "b"], "model": "a"})
        assert reply.json()["model"] == "a"
        assert [lora and lora.lora_name for lora in engine.loras] == ["a", "a"]

    with_client(use, engine, {"lora_modules": [f"a={path}"]})


# ---- loading and unloading


def test_adapters_are_loaded_and_unloaded_where_that_is_allowed(tmp_path: Path) -> None:
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

    async def use(client: httpx.AsyncClient) -> None:
        async def load(path: object, name: object = "x", **more: Any) -> httpx.Response:
            return await client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **more})

        done = await load(good)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert engine.adapters["x"].within == (inside,), "links that are put there later"
        assert done.headers["content-type"].startswith("text/plain")
        again = refused(await load(good))
        assert again["type"] == "InvalidUserInput" and "already been loaded" in again["message"]
        assert (await load(good, load_inplace=True)).status_code == 200
        for place in (
            outside,
            f"{inside}/../out/a",
            f"{inside}/link",
            linked,
            "/",
            "~",
            "s3://k/a",
            "file:///",
        ):
            assert refused(await load(place, "y"), 403)["type"] == "PermissionDeniedError"
        for place in (f"{inside}/none", inside, f"{inside}/a\0b", f"{inside}/{'a' * 5000}", circle):
            message = refused(await load(place, "y"), 404)["message"]
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

    engine = an_engine()
    with_client(use, engine, {"lora_roots": [inside]})
    assert not engine.adapters


def test_without_leave_nothing_can_be_loaded() -> None:
    async def absent(client: httpx.AsyncClient) -> None:
        assert (await client.post(LOAD, json={})).status_code == 404

    async def off(client: httpx.AsyncClient) -> None:
        body = {"lora_name": "a", "lora_path": "/a"}
        assert "--enable-lora" in refused(await client.post(LOAD, json=body))["message"]

    async def locked(client: httpx.AsyncClient) -> None:
        for route in (LOAD, UNLOAD):
            assert (await client.post(route, json={})).status_code == 401

    with_client(absent, an_engine(), env={})
    with_client(off, FakeEngine())
    with_client(locked, an_engine(), {"api_key": ["secret"]})


def test_an_adapter_that_is_unloaded_answers_those_who_have_it_and_nobody_else(tmp_path: Path) -> None:
    engine, path = an_engine(answer="x" * 50), adapter(tmp_path / "a")
    body = {"prompt": "ab", "model": "a", "max_tokens": 50}

    async def use(client: httpx.AsyncClient) -> None:
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

    with_client(use, engine, {"lora_modules": [f"a={path}"]})


def test_who_is_still_answered_by_an_adapter_that_leaves_is_so_with_its_tokens(tmp_path: Path) -> None:
    engine, path = an_engine(), adapter(tmp_path / "a")
    engine.inputs.enable_lora, engine.inputs.num_extra_vocab = True, 16
    backend = Tokenizer.from_str(engine.tokenizer.backend.to_str())
    backend.add_tokens(["<new>"])
    backend.save(str(path / "tokenizer.json"))
    leaving = LoRARegistry(modules=[LoRAModule("a", str(path), str(path), is_leaving=True)])
    api = Application(engine, make_settings({}, env=Env.read(CHANGES)), registry=leaving).api
    assert api.adapters.get("a") is None and api.adapters.take("a", {}) is None
    tokenizer = api.inputs_of("a").tokenizer
    assert tokenizer is not None and tokenizer.backend.token_to_id("<new>") == backend.token_to_id("<new>")


def test_an_adapter_that_a_core_does_not_let_go_is_still_there(tmp_path: Path) -> None:
    engine, path = an_engine(), adapter(tmp_path / "a")

    async def use(client: httpx.AsyncClient) -> None:
        engine.removal_error = EngineDead("a core is gone")
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 503
        assert (await client.get("/v1/models/a")).status_code == 200
        engine.removal_error = None
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 200
        refused(await client.get("/v1/models/a"), 404)

    with_client(use, engine, {"lora_modules": [f"a={path}"]})


def test_a_process_that_dies_while_it_unloads_leaves_no_name_behind(tmp_path: Path) -> None:
    """Another process takes the name for one that still leaves, for ever."""
    file, folder = tmp_path / "roster", tmp_path / "customers"
    path = adapter(folder / "acme")
    LoRARegistry.create(file, [LoRAModule("acme", str(path), str(path), is_leaving=True)])

    async def use(client: httpx.AsyncClient) -> None:
        reply = await client.post(COMPLETIONS, json={"prompt": "ab", "model": "acme"})
        assert reply.status_code == 200, reply.text

    env = CHANGES | {"VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)}
    with_client(use, an_engine(), env=env, registry=LoRARegistry(file))


def test_an_adapter_is_loaded_once_however_many_ask_at_once(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")

    async def use(client: httpx.AsyncClient) -> None:
        body = {"lora_name": "x", "lora_path": str(path)}
        replies = await asyncio.gather(*(client.post(LOAD, json=body) for _ in range(8)))
        assert sorted(reply.status_code for reply in replies) == [200, *[400] * 7]

    with_client(use, an_engine(step_s=0.01), {"lora_roots": [str(tmp_path)]})


def test_processes_have_one_roster(tmp_path: Path) -> None:
    """What one API process loads and unloads, the others answer to or do not, at once."""
    file = tmp_path / "roster"
    LoRARegistry.create(file, [LoRAModule("a", "x", "/x")])
    one, other = LoRARegistry(file), LoRARegistry(file)
    assert list(other.all()) == ["a"] and not other.is_read
    one.put(LoRAModule("b", "y", "/y"))
    assert list(other.all()) == ["a", "b"]
    assert other.drop("a") == LoRAModule("a", "x", "/x") and other.drop("a") is None
    assert list(one.all()) == ["b"]
    one.mark_read()
    assert other.is_read

    async def in_turn() -> list[str]:
        order = []

        async def change(registry: LoRARegistry, who: str) -> None:
            async with registry.only("b"):
                order.append(who)
                await asyncio.sleep(0.1)
                order.append(who)

        await asyncio.gather(change(one, "one"), change(other, "other"))
        return order

    order = asyncio.run(in_turn())
    assert order[0] == order[1] and order[2] == order[3]


# ---- found by name


def test_a_folder_for_each_customer(tmp_path: Path) -> None:
    folder = tmp_path / "customers"
    adapter(folder / "acme"), adapter(folder / "broken", ""), adapter(tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "empty").mkdir()

    async def use(client: httpx.AsyncClient) -> None:
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

    engine = an_engine()
    with_client(use, engine, env=CHANGES | {"VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)})
    assert list(engine.adapters) == ["late"]
    assert str(folder.resolve()) in engine.adapters["late"].within, "links that are put there later"


def test_hub_ids_are_found_if_they_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path / "a")

    def fetch(repo: str, check: Callable[[int], None]) -> Path:
        check(5000 if repo == "org/large" else 10)
        return path

    monkeypatch.setattr("quire.server.lora.locations.fetch_adapter", fetch)

    async def use(client: httpx.AsyncClient) -> None:
        for name, status in (("org/any", 200), ("me/one", 200), ("me/two", 404), ("org", 404)):
            reply = await client.post(COMPLETIONS, json={"prompt": "ab", "model": name})
            assert reply.status_code == status, reply.text
        large = await client.post(LOAD, json={"lora_name": "x", "lora_path": "org/large"})
        assert "--lora-max-download-bytes" in refused(large)["message"]

    settings = {"lora_resolver_hub": ["org/*", "me/one"], "lora_max_download_bytes": 4000}
    with_client(use, an_engine(), settings)


def test_adapters_behind_urls_are_brought_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    store = fsspec.filesystem("memory")
    for name, content in (("acme", b"weights"), ("large", b"x" * 5000)):
        store.pipe({f"/k/{name}/adapter_config.json": b"{}", f"/k/{name}/adapter_model.bin": content})
    store.pipe("/other/a/adapter_config.json", b"{}")

    async def use(client: httpx.AsyncClient) -> None:
        async def load(place: str, status: int) -> str:
            reply = await client.post(LOAD, json={"lora_name": "x", "lora_path": place})
            assert reply.status_code == status, reply.text
            return reply.text

        reply = await client.post(COMPLETIONS, json={"prompt": "ab", "model": "acme"})
        assert reply.status_code == 200, reply.text
        refused(await client.post(COMPLETIONS, json={"prompt": "ab", "model": "none"}), 404)
        await load("memory://k/none", 404)
        for place in (
            "memory://other/a",
            "memory://k/../other/a",
            "memory://k/%2e%2e/other/a",
            "memory://k/./acme",
            "memory://k/acme?version=1",
            "memory://k/acme#part",
            "memory://kk/a",
            "zip://a::memory://k/acme",
        ):
            await load(place, 403)
        assert "--lora-max-download-bytes" in await load("memory://k/large", 400)
        await load("memory://k/acme", 200)
        store.pipe("/k/acme/adapter_model.bin", b"others!")  # as many bytes
        again = {"lora_name": "x", "lora_path": "memory://k/acme", "load_inplace": True}
        assert (await client.post(LOAD, json=again)).status_code == 200

    engine = an_engine()
    with_client(use, engine, {"lora_resolver_dir": "memory://k/", "lora_max_download_bytes": 4000})
    found = {name: Path(lora.lora_path, "adapter_model.bin") for name, lora in engine.adapters.items()}
    contents = {name: file.read_bytes() for name, file in found.items()}
    assert contents == {"acme": b"weights", "x": b"others!"}, "what changes there is fetched again"
    assert len(list((tmp_path / "adapters").iterdir())) == 2, "the same adapter is kept once"


def test_an_adapter_behind_a_url_brings_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To every route that reads or writes tokens, and to no other model."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    engine = an_engine()
    engine.inputs.enable_lora, engine.inputs.num_extra_vocab = True, 16
    backend = Tokenizer.from_str(engine.tokenizer.backend.to_str())
    backend.add_tokens(["<new>"])
    last, plain = backend.token_to_id("<new>"), {"model": engine.facts.model_names[0]}
    store = fsspec.filesystem("memory")
    files = {"adapter_config.json": b"{}", "adapter_model.bin": b"weights"}
    files |= {"tokenizer.json": backend.to_str().encode(), "chat_template.jinja": b"<new>"}
    store.pipe({f"/own/acme/{name}": content for name, content in files.items()})
    answer = {"choices": [{"index": 0, "token_ids": [last], "finish_reason": "stop"}]}

    async def use(client: httpx.AsyncClient) -> None:
        async def post(path: str, **body: Any) -> Any:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        own = {"model": "acme"}
        assert (await post("/tokenize", **own, prompt="<new>"))["tokens"][-1] == last
        assert (await post("/tokenize", **own, messages=MESSAGES))["tokens"][-1] == last
        assert last not in (await post("/tokenize", **plain, prompt="<new>"))["tokens"]
        assert (await post("/detokenize", **own, tokens=[last])) == {"prompt": "<new>"}
        found = await post(f"{COMPLETIONS}/derender", **own, generate_responses=[answer])
        assert (found["model"], found["choices"][0]["text"]) == ("acme", "<new>")
        asked = {"model": "acme", "messages": MESSAGES}
        for given in (own, own | {"chat_request": asked}, {"chat_request": asked}):
            found = await post(f"{CHAT}/derender", **given, generate_response=answer)
            assert found["choices"][0]["message"]["content"] == "<new>"
        for path, body in (
            ("/detokenize", {"tokens": [last + 16]}),
            (f"{COMPLETIONS}/derender", {"generate_responses": [answer]}),
        ):
            refused(await client.post(path, json=plain | body))
        infos = [(await client.get("/tokenizer_info", params=each)).json() for each in (own, plain, {})]
        assert [str(last) in info["added_tokens_decoder"] for info in infos] == [True, False, False]
        assert infos[0]["chat_template"] == "<new>" and infos[1] == infos[2]
        refused(await client.get("/tokenizer_info", params={"model": "nobody"}), 404)
        store.pipe("/own/acme/chat_template.jinja", b"<new><new>")
        again = {"lora_name": "acme", "lora_path": "memory://own/acme", "load_inplace": True}
        assert (await client.post(LOAD, json=again)).status_code == 200
        assert (await post("/tokenize", **own, messages=MESSAGES))["tokens"][-2:] == [last, last]

    with_client(use, engine, {"lora_resolver_dir": "memory://own/", "enable_tokenizer_info_endpoint": True})


def test_a_url_that_nothing_here_can_read_says_what_is_missing(tmp_path: Path) -> None:
    places = LoRALocations(cache=tmp_path, max_bytes=1)
    with pytest.raises(ValueError, match="nope.*cannot be read"):
        places.for_operator("nope://a/b")
    with pytest.raises(NotFound, match="No adapter found for 'memory://k/none'"):
        places.for_operator("memory://k/none")


def test_names_that_were_not_found_are_not_looked_for_again_at_once(tmp_path: Path) -> None:
    found = resolver.Resolver("memory://k", LoRALocations(roots=["memory://k"], cache=tmp_path, max_bytes=1))
    assert found.may_have("gone") and found.find("gone") is None
    assert not found.may_have("gone")


def test_an_engine_that_sleeps_breaks_no_adapter(tmp_path: Path) -> None:
    """What was asked for meanwhile is refused for ten seconds after."""
    engine, folder = an_engine(), tmp_path / "customers"
    adapter(folder / "acme")

    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": "ab", "model": "acme"}
        engine.addition_error = RequestError("the engine sleeps: wake it up first")
        assert "sleeps" in refused(await client.post(COMPLETIONS, json=body))["message"]
        engine.addition_error = None
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    with_client(use, engine, env=CHANGES | {"VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)})


def test_a_store_that_never_answers_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    async def go() -> None:
        looks = search.Search()
        assert await looks(str.upper, "a") == "A"
        monkeypatch.setattr(search, "SEARCH_S", 0.2)
        stuck = [looks(lambda _: never.wait(), "a") for _ in range(6)]
        found = await asyncio.gather(*stuck, return_exceptions=True)
        assert [type(each) for each in found] == [EngineDead] * 6
        never.set()
        monkeypatch.setattr(search, "SEARCH_S", PATIENCE_S)
        assert await looks(str.upper, "b") == "B"

    asyncio.run(go())
