"""Tests of API keys with names and limits: the key file, the rate limits, and their answers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ask import CHAT, COMPLETIONS, EMBEDDER, MESSAGES, client_of, fetch, refused
from disconnecting import post
from fake_engine import FakeEngine

from quire.config.env import Env
from quire.data.latency_target import LatencyTarget
from quire.errors import ConfigError
from quire.metrics.api_keys import KeyPages
from quire.server.api_keys import Key, digest, key_names, read_keys
from quire.server.app import Application
from quire.server.key_limits import Ledger
from quire.server.settings import make_settings

ENTRIES = [
    {"name": "team", "key": "sk-team-1", "weight": 3, "max_concurrency": 2, "tokens_per_minute": 600},
    {"name": "guest", "key": "sk-guest"},
]
TOML = (
    '[[keys]]\nname = "team"\nkey = "sk-team-1"\nweight = 3\nmax_concurrency = 2\ntokens_per_minute = 600\n'
)
YAML = "keys:\n  - {name: team, key: sk-team-1, weight: 3, max_concurrency: 2, tokens_per_minute: 600}\n"


def file_of(folder: Path, content: Any, name: str = "keys.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


# ---- the key file


@pytest.mark.parametrize(
    ("name", "content"),
    [("k.json", {"keys": ENTRIES[:1]}), ("k.toml", TOML), ("k.yaml", YAML), ("k.YML", YAML)],
)
def test_key_file_is_read(tmp_path: Path, name: str, content: Any) -> None:
    assert read_keys([file_of(tmp_path, content, name)]) == (Key(digest(b"sk-team-1"), "team", 3.0, 2, 600),)


def test_key_files_and_plain_keys_are_combined(tmp_path: Path) -> None:
    keys = read_keys(["plain", "@" + file_of(tmp_path, {"keys": ENTRIES}, "no-suffix")])
    assert key_names(keys) == ["team", "guest"] and keys[0] == Key(digest(b"plain"))
    assert (keys[2].weight, keys[2].max_concurrency, keys[2].tokens_per_minute) == (1.0, None, None)


def test_targets_of_a_key_replace_those_of_the_server(tmp_path: Path) -> None:
    (key, plain) = read_keys([file_of(tmp_path, {"keys": [*one(slo_ttft_ms=200)["keys"], ENTRIES[1]]})])
    assert key.target == LatencyTarget(0.2, 0.0) and plain.target is None
    ledger = Ledger([key, plain])
    accounts = [ledger.account(key), ledger.account(plain)]
    assert [account and account.target for account in accounts] == [key.target, None]


def one(**fields: Any) -> dict[str, Any]:
    return {"keys": [{"name": "a", "key": "sk-secret"} | fields]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"keys": [*ENTRIES, ENTRIES[1] | {"key": "x"}]}, "two keys have the name 'guest'"),
        (
            {"keys": [*ENTRIES, {"name": "third", "key": "sk-guest"}]},
            "the same key is given as guest and third",
        ),
        (one(weight=0), "weight is 0, expected a number above 0"),
        (one(weight=-1.5), "weight is -1.5"),
        (one(weight=True), "weight is True"),
        (one(weight="sk-secret"), "weight is a str"),
        ('{"keys": [{"name": "a", "key": "sk-secret", "weight": NaN}]}', "weight is nan"),
        (one(max_concurrency=0), "max_concurrency is 0, expected an integer of at least 1"),
        (one(tokens_per_minute=1.5), "tokens_per_minute is 1.5"),
        (one(cache_group=""), "cache_group must be a text of 1 to 64 printable characters"),
        (one(cache_group=7), "cache_group must be a text"),
        (one(slo_ttft_ms=0), "slo_ttft_ms is 0, expected milliseconds above 0"),
        (one(slo_itl_ms="sk-secret"), "slo_itl_ms is a str"),
        (one(wieght=1), "unknown field 'wieght'; did you mean 'weight'?"),
        (one(**{"sk-secret": 1}), "keys[0]: unknown field; known: name, key, weight"),
        (one(name=""), "keys[0]: name must be"),
        (one(name="a\nb"), "keys[0]: name must be"),
        (one(key=""), "keys[0] ('a'): key must be"),
        (one(key=" sk-secret"), "key must be a text without spaces around it"),
        (one(key=5), "key must be"),
        ({"keys": []}, "must hold a list `keys` with at least one key"),
        ({"keys": ["sk-secret"]}, "keys[0] must be an object with `name` and `key`"),
        ([], "must hold a list `keys`"),
        (one() | {"default": 1}, "unknown field 'default' beside `keys`"),
        ('{"keys": [{"key": "sk-secret"', "is not valid JSON near line 1"),
    ],
)
def test_invalid_key_file_is_refused_without_its_secrets(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_keys([file_of(tmp_path, content)])
    assert (
        message in str(raised.value)
        and "keys.json" in str(raised.value)
        or "two keys" in message
        or "same" in message
    )
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize("name", ["k.toml", "k.yaml"])
def test_parse_errors_do_not_quote_the_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not valid") as raised:
        read_keys([file_of(tmp_path, "a: [sk-secret\n} = = {", name)])
    assert "sk-secret" not in str(raised.value)


def test_path_of_a_missing_file_is_not_used_as_a_key(tmp_path: Path) -> None:
    """Catches a typo that would make the path itself a valid key."""
    for value in (str(tmp_path / "gone.json"), f"@{tmp_path}/gone", f"@{tmp_path}"):
        with pytest.raises(ConfigError, match="cannot read"):
            read_keys([value])
    (tmp_path / "raw.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_keys([str(tmp_path / "raw.json")])
    with pytest.raises(ConfigError, match="empty"):
        read_keys([""])


def test_repr_shows_no_key(tmp_path: Path) -> None:
    settings = make_settings({"api_key": ["sk-plain", file_of(tmp_path, {"keys": ENTRIES})]})
    shown = repr(settings) + repr(Ledger(settings.keys).keys)
    assert "sk-" not in shown and digest(b"sk-guest").hex() not in shown and "'team'" in shown


# ---- the token buckets


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def ledger_of(pages: KeyPages | None = None, **limits: int) -> tuple[Ledger, Key, Clock]:
    key, clock = Key(digest(b"k"), "team", 1.0, **limits), Clock()
    return Ledger([key], pages, clock), key, clock


def test_token_budget_is_available_at_once_and_refills_evenly() -> None:
    ledger, key, clock = ledger_of(tokens_per_minute=600)
    account = ledger.account(key)
    assert account is not None and ledger.enter(key) is None
    account.add_prompt(400)
    assert ledger.enter(key) is None, "200 are left"
    account.add_output(500)
    refusal = ledger.enter(key)
    assert refusal is not None and refusal.retry_after_s == 30, "300 too many, at 10 a second"
    assert "tokens_per_minute is 600" in str(refusal) and "in 30 s" in str(refusal)
    clock.now += 29
    refusal = ledger.enter(key)
    assert refusal is not None and refusal.retry_after_s == 1
    clock.now += 2
    assert ledger.enter(key) is None
    clock.now += 10_000
    assert ledger.enter(key) is None
    account.add_prompt(601)
    assert ledger.enter(key) is not None, "idle time fills it once, and no further"


def test_request_larger_than_the_budget_is_admitted_and_repaid() -> None:
    ledger, key, clock = ledger_of(tokens_per_minute=60)
    account = ledger.account(key)
    assert account is not None
    num_granted, minutes = 0, 60
    for _ in range(minutes * 60):
        if ledger.enter(key) is None:
            account.add_prompt(500)
            num_granted += 500
        clock.now += 1
    assert 60 * minutes - 500 <= num_granted <= 60 * minutes + 60 + 500


def test_finished_request_frees_a_slot() -> None:
    ledger, key, _ = ledger_of(max_concurrency=2)
    assert ledger.enter(key) is None and ledger.enter(key) is None
    refusal = ledger.enter(key)
    assert refusal is not None and refusal.retry_after_s >= 1 and "max_concurrency is 2" in str(refusal)
    ledger.leave(key)
    assert ledger.enter(key) is None


def test_processes_share_the_limits(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    KeyPages.create(file, 1, num_api=2)
    first, key, _ = ledger_of(KeyPages(["team"], file, process=0), max_concurrency=2, tokens_per_minute=100)
    second, _, _ = ledger_of(KeyPages(["team"], file, process=1), max_concurrency=2, tokens_per_minute=100)
    assert first.enter(key) is None and second.enter(key) is None
    assert "max_concurrency" in str(first.enter(key)) and "max_concurrency" in str(second.enter(key))
    first.leave(key)
    account = second.account(key)
    assert account is not None
    account.add_output(100)
    assert "tokens_per_minute" in str(first.enter(key)), "used by the other process"
    # A process that was killed and restarted has no open request.
    again, alone, _ = ledger_of(KeyPages(["team"], file, process=1), max_concurrency=1)
    assert again.enter(alone) is None
    samples = {
        sample.name: sample.value
        for family in KeyPages(["team"], file).families()
        for sample in family.samples
    }
    assert samples["quire:key_requests_total"] == 3 and samples["quire:key_generation_tokens_total"] == 100


# ---- over HTTP


class Served:
    """Application with these keys, and its clients."""

    def __init__(self, engine: FakeEngine, settings: dict[str, Any]) -> None:
        made = make_settings(settings, env=Env.read({"VLLM_ENABLE_RESPONSES_API_STORE": "1"}))
        self.engine = engine
        self.pages = KeyPages(key_names(made.keys))
        self.application = Application(engine, made, self.pages)

    def client(self, key: str) -> httpx.AsyncClient:
        return client_of(self.application.asgi, headers={"authorization": f"Bearer {key}"})

    def count(self, counter: str, key: int = 0) -> float:
        return self.pages.total(key, counter)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    def make(*entries: dict[str, Any], engine: FakeEngine | None = None, **settings: Any) -> Served:
        file = file_of(tmp_path, {"keys": entries or ENTRIES})
        return Served(engine or FakeEngine(), settings | {"api_key": [file]})

    return make


def ask(served: Served, key: str, path: str = CHAT, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return fetch(served.application.asgi, "POST", path, json=body or {"messages": MESSAGES}, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_token_counts_equal_usage(serve: Serve, stream: bool) -> None:
    served = serve()
    fields: dict[str, Any] = {"prompt": ["ab", "abc"], "n": 2, "stream": stream, "max_tokens": 4}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    reply = ask(served, "sk-guest", COMPLETIONS, **fields)
    last_text = reply.text.split("data: ")[-2] if stream else reply.text
    usage = json.loads(last_text)["usage"]
    counted = [
        served.count(what, 1) for what in ("prompt_tokens", "generation_tokens", "requests", "running")
    ]
    assert counted == [usage["prompt_tokens"], usage["completion_tokens"], 1, 0]
    assert served.count("requests", 0) == 0


def test_pooling_and_beam_search_are_counted(serve: Serve) -> None:
    served = serve(engine=FakeEngine(pooling=EMBEDDER))
    assert ask(served, "sk-guest", "/v1/embeddings", input=["ab", "c"]).status_code == 200
    assert [served.count(what, 1) for what in ("prompt_tokens", "generation_tokens")] == [3, 0]
    served = serve()
    body = {"prompt": "ab", "use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0}
    assert ask(served, "sk-guest", COMPLETIONS, **body).status_code == 200
    assert served.count("prompt_tokens", 1) == 2 and served.count("generation_tokens", 1) >= 3


def test_tokens_per_minute_above_the_limit_is_429(serve: Serve) -> None:
    served = serve({"name": "t", "key": "sk-t", "tokens_per_minute": 30})
    assert ask(served, "sk-t").status_code == 200
    reply = ask(served, "sk-t")
    error = refused(reply, 429)
    assert error["type"] == "RateLimitError" and "tokens_per_minute is 30" in error["message"]
    assert int(reply.headers["retry-after"]) >= 1 and reply.headers["retry-after"] in error["message"]
    assert "sk-t" not in reply.text
    assert len(served.engine.seen) == 1, "the second did not reach the engine"
    assert (served.count("tokens"), served.count("requests"), served.count("running")) == (1, 1, 0)
    # Routes without tokens are still served.
    assert ask(served, "sk-t", "/tokenize", prompt="ab").status_code == 200
    anthropic = ask(served, "sk-t", "/v1/messages", messages=[])
    assert anthropic.status_code == 429 and anthropic.json()["error"]["type"] == "rate_limit_error"


def test_rate_limit_is_checked_before_the_body(serve: Serve) -> None:
    served = serve({"name": "t", "key": "sk-t", "tokens_per_minute": 1})
    assert ask(served, "sk-t").status_code == 200
    assert ask(served, "sk-t", CHAT, nonsense=1).status_code == 429, "it would be a 400"


@pytest.mark.parametrize("stream", [False, True])
async def test_max_concurrency_of_one_admits_one_request(serve: Serve, stream: bool) -> None:
    """One of several concurrent requests is answered; its slot is free afterwards, and after one that
    fails."""
    served = serve({"name": "t", "key": "sk-t", "max_concurrency": 1}, engine=FakeEngine(step_s=0.01))
    async with served.client("sk-t") as client:
        body = {"messages": MESSAGES, "stream": stream, "max_tokens": 30, "ignore_eos": True}
        replies = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(4)))
        assert sorted(reply.status_code for reply in replies) == [200, 429, 429, 429]
        assert (await client.post(CHAT, json={"messages": 5})).status_code == 400
        assert (served.count("concurrency"), served.count("running")) == (3, 0)
        served.engine.fail_after = 0
        failed = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream})
    assert failed.status_code == (200 if stream else 500) and "the engine failed" in failed.text
    assert served.count("running") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_frees_the_slot(serve: Serve, stream: bool) -> None:
    served = serve({"name": "t", "key": "sk-t", "max_concurrency": 1}, engine=FakeEngine(step_s=0.01))
    body = {"messages": MESSAGES, "stream": stream, "max_tokens": 400, "ignore_eos": True}
    disconnect = asyncio.Event()
    task = asyncio.create_task(post(served.application, CHAT, body, disconnect, "sk-t"))
    while not served.engine.num_in_flight:
        await asyncio.sleep(0.001)
    assert served.count("running") == 1
    disconnect.set()
    await asyncio.wait_for(task, 60)
    assert served.count("running") == 0 and served.engine.num_in_flight == 0


async def test_background_response_holds_its_slot_until_it_ends(serve: Serve) -> None:
    """Catches background responses without a limit, and a limit that prevents cancelling them."""
    served = serve(
        {"name": "t", "key": "sk-t", "max_concurrency": 1}, engine=FakeEngine("x" * 400, step_s=0.05)
    )
    async with served.client("sk-t") as client:
        body = {"input": "x", "background": True, "max_output_tokens": 400}
        first = await client.post("/v1/responses", json=body)
        assert first.status_code == 200 and served.count("running") == 1
        assert (await client.post("/v1/responses", json=body)).status_code == 429
        cancelled = await client.post(f"/v1/responses/{first.json()['id']}/cancel")
        assert cancelled.status_code == 200 and served.count("running") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "ab"}),
        ("/v1/responses", {"input": "ab"}),
        ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 5}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}),
        ("/invocations", {"prompt": "ab"}),
    ],
)
def test_every_generating_route_is_counted_and_limited(serve: Serve, path: str, body: dict[str, Any]) -> None:
    served = serve({"name": "t", "key": "sk-t", "tokens_per_minute": 1})
    first = ask(served, "sk-t", path, **body)
    assert first.status_code == 200, first.text
    counted = [served.count(what) for what in ("requests", "prompt_tokens", "generation_tokens")]
    assert counted[0] == 1 and counted[1] >= 2 and counted[2] >= 5
    second = ask(served, "sk-t", path, **body)
    assert second.status_code == 429 and int(second.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer " + "x" * 60_000},
        {"authorization": b"Bearer \xff\xfe\x00".decode("latin-1")},
        {"authorization": "Bearer sk-guest, Bearer sk-guest"},
        {"authorization": "Bearer  sk-guest"},
        {"authorization": "Bearer", "x-api-key": "sk-guest"},
        {"authorization": "", "x-api-key": ""},
        {"x-api-key": "sk-gues"},
    ],
)
def test_malformed_auth_headers_are_refused(serve: Serve, headers: dict[str, str]) -> None:
    served = serve()
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    reply = fetch(served.application.asgi, "POST", CHAT, json={"messages": MESSAGES}, headers=raw)
    assert reply.status_code == 401 and reply.json()["error"]["type"] == "AuthenticationError"
    assert not served.engine.seen and served.count("requests", 0) == served.count("requests", 1) == 0


def test_key_in_x_api_key_header(serve: Serve) -> None:
    served = serve()
    headers = {"x-api-key": "sk-guest"}
    reply = fetch(served.application.asgi, "POST", CHAT, json={"messages": MESSAGES}, headers=headers)
    assert reply.status_code == 200 and served.count("requests", 1) == 1


def test_render_costs_no_tokens(serve: Serve) -> None:
    served = serve()
    assert ask(served, "sk-guest", f"{CHAT}/render").json()["token_ids"]
    assert (served.count("prompt_tokens", 1), served.count("requests", 1)) == (0, 1)
