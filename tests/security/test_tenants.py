"""Isolation of tenants (CVE-2025-46570, CVE-2025-46722): a key reads no data of another key, cannot infer it
from timing, and cannot slow it down through an unmetered route."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from ask import CHAT, COMPLETIONS, EMBEDDER, MESSAGES, client_of
from fake_engine import FakeEngine
from fake_inputs import data_url, engine_with_media, file_of, image_part, media, picture

from quire.config.env import Env
from quire.data.cache_scope import CACHE_SCOPE, scoped_salt
from quire.data.multimodal import MediaItem
from quire.data.request import Request
from quire.frontend.in_flight import prefix_extra
from quire.frontend.prefix_map import PrefixKeys
from quire.metrics.api_keys import KeyPages
from quire.multimodal.processor_cache import ProcessorCache
from quire.sched.kv_manager import _root_key
from quire.server.api_keys import key_names
from quire.server.app import Application
from quire.server.http.limits import OPERATOR_PATHS, TOKENLESS_PATHS, UNLIMITED_PATHS
from quire.server.key_limits import Ledger
from quire.server.settings import make_settings

KEYS = """
[[keys]]
name = "a"
key = "key-a"

[[keys]]
name = "b"
key = "key-b"

[[keys]]
name = "c"
key = "key-c"
cache_group = "friends"

[[keys]]
name = "d"
key = "key-d"
cache_group = "friends"
max_concurrency = 1
tokens_per_minute = 1
"""
SALTS = (None, "a", "key a", "\0", "\0005 key a-", "\0005 key a+x", "x", "5 key a-")
CHAT_BODY = {"messages": MESSAGES}


class Server:
    """An application with keys and a fake engine, and the requests that have reached the engine."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None, environ: dict[str, str] | None = None):
        file = folder / "keys.toml"
        file.write_text(KEYS)
        self.engine = engine or FakeEngine()
        settings = make_settings(
            {"api_key": [str(file), "plain", "plainer"]}, env=Env.read({"HOME": "/", **(environ or {})})
        )
        pages = KeyPages(key_names(settings.keys))
        self.application = Application(self.engine, settings, pages)
        self.ledger = Ledger(settings.keys, pages)
        self.requests: list[Request] = []
        make, make_pooling = self.engine.inputs.requests, self.engine.inputs.pooling_request

        def requests(*args: Any, **options: Any) -> list[Request]:
            made = make(*args, **options)
            self.requests += made
            return made

        def pooling_request(*args: Any, **options: Any) -> Request:
            self.requests.append(make_pooling(*args, **options))
            return self.requests[-1]

        self.engine.inputs.requests = requests  # type: ignore[method-assign]
        self.engine.inputs.pooling_request = pooling_request  # type: ignore[method-assign]

    async def post(self, key: str, path: str, **options: Any) -> httpx.Response:
        async with client_of(self.application.asgi) as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(path, headers=headers, **options)

    def send(self, key: str, path: str, body: Any) -> Request:
        """Send a body and return the request that it became."""
        self.requests.clear()
        reply = asyncio.run(self.post(key, path, json=body))
        assert reply.status_code == 200, reply.text
        return self.requests[0]


# ---- prefix cache


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHAT_BODY),
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": ["hello", "you"], "max_tokens": 2, "n": 2}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 2, "use_beam_search": True, "n": 2}),
        ("/v1/messages", {**CHAT_BODY, "max_tokens": 2}),
        ("/v1/responses", {"input": "hello"}),
        ("/invocations", CHAT_BODY),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
        (f"{CHAT}/batch", {"messages": [MESSAGES, MESSAGES]}),
    ],
)
def test_every_route_separates_the_prefix_cache_of_keys(tmp_path: Path, path: str, body: Any) -> None:
    server = Server(tmp_path)
    roots = {key: _root_key(server.send(key, path, body)) for key in ("key-a", "key-b", "key-c", "plain")}
    assert len(set(roots.values())) == 4
    assert _root_key(server.send("key-a", path, body)) == roots["key-a"]
    assert _root_key(server.send("plainer", path, body)) == roots["plain"]
    assert all(_root_key(request) == roots["plain"] for request in server.requests)


def test_pooling_prompts_have_separate_prefixes(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(pooling=EMBEDDER))
    body = {"input": "hello"}
    roots = [_root_key(server.send(key, "/v1/embeddings", body)) for key in ("key-a", "key-b", "plain")]
    assert len(set(roots)) == 3


def test_cache_groups_share_and_plain_keys_share(tmp_path: Path) -> None:
    server = Server(tmp_path)
    body = {"max_tokens": 1, "prompt": "x"}
    salts = {
        key: server.send(key, COMPLETIONS, body).cache_salt for key in ("key-c", "key-a", "plain", "plainer")
    }
    assert salts["plain"] is salts["plainer"] is None
    assert asyncio.run(server.post("key-d", COMPLETIONS, json=body)).status_code == 200
    assert server.requests[-1].cache_salt == salts["key-c"] != salts["key-a"]


def test_client_salt_cannot_equal_the_salt_of_another_scope() -> None:
    """The names of keys are public in the metrics, so a client could write a salt that contains the name of
    another key."""
    salts = []
    for scope in ("", "key a", "key b", "group a", "key a-", "key a+x"):
        token = CACHE_SCOPE.set(scope)
        salts += [scoped_salt(salt) for salt in SALTS]
        CACHE_SCOPE.reset(token)
    assert len(set(salts)) == len(salts)
    assert [scoped_salt(salt) for salt in salts[:2]] == salts[:2] == [None, "a"]


def test_data_parallel_routing_uses_the_salted_prefix(tmp_path: Path) -> None:
    """The chosen engine would otherwise reveal what another key has cached."""
    server, keys = Server(tmp_path), PrefixKeys(2)
    routes = []
    for key in ("key-a", "key-b", "key-a"):
        request = server.send(key, COMPLETIONS, {"prompt": "hello you", "max_tokens": 1})
        routes.append(keys.of(request.tokens[: request.prompt_len], prefix_extra(request))[1].tolist())
    assert routes[0] == routes[2] and not {*routes[0]} & {*routes[1]}


async def test_request_does_not_inherit_the_key_of_the_previous_one(tmp_path: Path) -> None:
    """A server may run the next request of a connection in the context of the previous one."""
    server = Server(tmp_path)
    for key in ("key-a", "plain"):
        await server.post(key, COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    assert [request.cache_salt is None for request in server.requests] == [False, True]


# ---- media


def images(server: Server, key: str, *parts: Any, path: str = CHAT) -> list[MediaItem]:
    request = server.send(key, path, {"messages": [{"role": "user", "content": list(parts)}]})
    assert request.media is not None
    return request.media.items


@pytest.fixture
def vision_server(tmp_path: Path) -> Server:
    return Server(tmp_path, engine_with_media(media(processor_cache=ProcessorCache(1 << 20))))


def test_media_uuid_of_another_key_is_unknown(vision_server: Server) -> None:
    images(vision_server, "key-a", image_part(uuid="cat"))
    bare = {"type": "image_url", "image_url": None, "uuid": "cat"}
    talk = {"messages": [{"role": "user", "content": [bare]}]}
    assert images(vision_server, "key-a", bare)
    for path in (CHAT, f"{CHAT}/render", "/tokenize"):
        for key in ("key-b", "plain", "key-c"):
            reply = asyncio.run(vision_server.post(key, path, json=talk))
            assert reply.status_code == 400 and "nothing is cached for the uuid" in reply.text
        assert asyncio.run(vision_server.post("key-a", path, json=talk)).status_code == 200


def test_key_cannot_plant_an_image_under_the_uuid_of_another(vision_server: Server) -> None:
    owner_url, other = (data_url(file_of(picture(seed=seed))) for seed in (1, 2))
    (planted,) = images(vision_server, "key-b", image_part(other, uuid="cat"))
    (image,) = images(vision_server, "key-a", image_part(owner_url, uuid="cat"))
    (again,) = images(vision_server, "key-a", {"type": "image_url", "image_url": None, "uuid": "cat"})
    assert planted.key != image.key == again.key


def test_image_of_another_key_is_processed_anew(
    vision_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the image were not processed again, the time would reveal that another key has sent it."""
    made = []
    keep = ProcessorCache.put

    def keeping(self: ProcessorCache, name: bytes, key: bytes, *processed: Any) -> Any:
        made.append(key)
        return keep(self, name, key, *processed)

    monkeypatch.setattr(ProcessorCache, "put", keeping)
    keys = [images(vision_server, key, image_part())[0].key for key in ("key-a", "key-b", "key-a", "plain")]
    assert made == [keys[0], keys[1], keys[3]] and len(set(made)) == 3 and keys[0] == keys[2]
    assert images(vision_server, "plainer", image_part())[0].key == keys[3] and len(made) == 3
    (shared,) = images(vision_server, "key-c", image_part())
    limited = {"messages": [{"role": "user", "content": [image_part()]}]}
    assert asyncio.run(vision_server.post("key-d", CHAT, json=limited)).status_code == 200
    sent = vision_server.requests[-1].media
    assert sent is not None and sent.items[0].key == shared.key and len(made) == 4


# ---- unmetered routes


def test_unmetered_routes_are_cheap_or_absent(tmp_path: Path) -> None:
    """A tenant that repeats such a route forever must not slow down others."""
    assert UNLIMITED_PATHS.keys() == {"/ping"} | OPERATOR_PATHS and all(UNLIMITED_PATHS.values())
    server = Server(tmp_path)
    for path in OPERATOR_PATHS:
        for query in ("", "?reset_running_requests=true"):
            assert asyncio.run(server.post("key-b", path + query)).status_code == 404
    assert asyncio.run(server.post("key-b", "/ping")).status_code == 200
    engine = server.engine
    assert not engine.num_resets and not engine.operation.calls and not server.requests


def test_operator_routes_ignore_rate_limits(tmp_path: Path) -> None:
    server = Server(tmp_path, environ={"VLLM_SERVER_DEV_MODE": "1"})
    assert asyncio.run(server.post("key-d", COMPLETIONS, json={"prompt": "hello"})).status_code == 200
    assert asyncio.run(server.post("key-d", COMPLETIONS, json={"prompt": "hello"})).status_code == 429
    assert asyncio.run(server.post("key-d", "/reset_prefix_cache")).json() == {"success": True}


def test_every_other_post_route_is_metered(tmp_path: Path) -> None:
    """A new route is metered unless UNLIMITED_PATHS has a reason why not."""
    server = Server(tmp_path, environ={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    paths = {
        getattr(route, "path", "")
        for route in server.application.routes.routes
        if "POST" in (getattr(route, "methods", None) or ())
    }
    counted = sorted(path for path in paths - UNLIMITED_PATHS.keys() if not path.endswith("/cancel"))
    assert len(counted) > 20

    (limited,) = (key for key in server.ledger.keys if key.name == "d")
    assert server.ledger.enter(limited) is None  # the only slot of this key

    async def all_replies() -> dict[str, int]:
        return {path: (await server.post("key-d", path)).status_code for path in counted}

    assert set(asyncio.run(all_replies()).values()) == {429}


def test_routes_without_tokens_ignore_the_token_limit(tmp_path: Path) -> None:
    """These routes cost no tokens, and clients use them to count tokens."""
    server = Server(tmp_path)
    assert asyncio.run(server.post("key-d", COMPLETIONS, json={"prompt": "hello"})).status_code == 200
    assert asyncio.run(server.post("key-d", COMPLETIONS, json={"prompt": "hello"})).status_code == 429
    for path in ("/tokenize", f"{COMPLETIONS}/render"):
        assert path in TOKENLESS_PATHS
        assert asyncio.run(server.post("key-d", path, json={"prompt": "hello"})).status_code == 200
