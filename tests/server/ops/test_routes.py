"""Tests of the operator routes: they exist in developer mode only, and invalid queries and bodies are
refused."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from ask import application_of, fetch, refused
from fake_engine import FakeEngine

from quire.config.env import Env
from quire.errors import EngineDead, EngineError, RequestError
from quire.server.ops.unsupported_routes import ABSENT_ROUTES

ROUTES = [
    *[("POST", f"/{name}") for name in ("sleep", "wake_up", "pause", "resume", "collective_rpc")],
    *[("POST", f"/{name}") for name in ("abort_requests", "reset_mm_cache", "reset_encoder_cache")],
    ("POST", "/reset_prefix_cache"),
    *[("GET", f"/{name}") for name in ("is_sleeping", "is_paused", "server_info", "get_world_size")],
    *[("POST", f"/{name}") for name in ("init_weight_transfer_engine", "start_weight_update")],
    *[("POST", f"/{name}") for name in ("update_weights", "finish_weight_update", "update_weight_version")],
    ("GET", "/weight_info"),
]
ENV = Env.read({"HOME": "/", "VLLM_SERVER_DEV_MODE": "1"})


def ask(
    method: str, path: str, engine: FakeEngine | None = None, env: Env | None = ENV, **kwargs: Any
) -> httpx.Response:
    application = application_of(engine or FakeEngine(), kwargs.pop("settings", {}), env)
    return fetch(application.asgi, method, path, **kwargs)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_exist_in_developer_mode_only(method: str, path: str) -> None:
    assert ask(method, path, env=None).status_code == 404
    fields = {"method": "check_health", "init_info": {}, "update_info": {}, "new_version": "v1"}
    if path == "/abort_requests":
        fields = {"request_ids": []}
    body = {"json": fields} if method == "POST" else {}
    reply = ask(method, path, **body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ABSENT_ROUTES)
def test_routes_that_only_vllm_has_are_refused_by_name(path: str) -> None:
    reply = ask("POST", path, env=None, json={})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == f"{path} is not supported: {ABSENT_ROUTES[path]}"
    assert path in (Path(__file__).parents[3] / "docs" / "migration.md").read_text()


def test_sleep_and_wake_up_reach_the_engine() -> None:
    engine = FakeEngine()
    calls = engine.operation.calls
    for path in ("/sleep", "/sleep?level=2&mode=keep", "/wake_up", "/wake_up?tags=weights&tags=kv_cache"):
        reply = ask("POST", path, engine)
        assert reply.status_code == 200 and reply.content == b""
    assert calls == [
        ("sleep", 1, "abort"),
        ("sleep", 2, "keep"),
        ("wake_up", None),
        ("wake_up", ["weights", "kv_cache"]),
    ]
    assert ask("GET", "/is_sleeping", engine).json() == {"is_sleeping": False}


def test_prefix_cache_reset_may_include_running_requests() -> None:
    engine = FakeEngine()
    for query, running in (("", False), ("?reset_running_requests=true", True)):
        assert ask("POST", f"/reset_prefix_cache{query}", engine).json() == {"success": True}
        assert engine.resets_running is running
    refused(ask("POST", "/reset_prefix_cache?reset_running_requests=x", engine))


def test_pause_and_resume_reach_the_engine() -> None:
    engine = FakeEngine()
    assert ask("POST", "/pause", engine).json() == {"status": "paused"}
    assert ask("GET", "/is_paused", engine).json() == {"is_paused": True}
    assert ask("POST", "/pause?mode=wait&clear_cache=false", engine).json() == {"status": "paused"}
    assert ask("POST", "/resume", engine).json() == {"status": "resumed"}
    assert engine.operation.calls == [("pause", "abort", True), ("pause", "wait", False), ("resume",)]
    ask("POST", "/pause?wait_for_inflight_requests=true", engine)
    assert engine.operation.calls[-1] == ("pause", "wait", True)


def test_server_info_has_the_sections_that_trainers_read() -> None:
    engine = FakeEngine()
    engine.operation.settings |= {
        "model": {"logprobs_mode": "processed_logprobs"},
        "lora": {"enable_lora": False},
        "extensions": {"weight_transfer_config": {"backend": "nccl"}},
    }
    config = ask("GET", "/server_info?config_format=json", engine).json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"} and config["lora_config"] is None
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    engine.operation.settings["extensions"] = {"weight_transfer_config": {}}
    config = ask("GET", "/server_info?config_format=json", engine).json()["vllm_config"]
    assert config["weight_transfer_config"] is None


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep?level=3", "/sleep?level=-1", "/sleep?level=deep", "/sleep?level=1.5", "/sleep?mode=later"),
        *("/wake_up?tags=dreams", "/wake_up?tags=", "/pause?mode=now", "/pause?clear_cache=perhaps"),
        *(f"/sleep?level={'9' * 5000}", "/wake_up?tags=weights&tags=%00"),
    ],
)
def test_invalid_queries_are_refused(path: str) -> None:
    engine = FakeEngine()
    refused(ask("POST", path, engine))
    assert not engine.operation.calls


@pytest.mark.parametrize(
    "body",
    [
        *(None, [], {}, {"method": 1}, {"method": ""}, {"method": "x" * 1000}, {"method": None}),
        *({"method": "f", "args": "abc"}, {"method": "f", "args": {}}, {"method": "f", "kwargs": []}),
        *({"method": "f", "timeout": 0}, {"method": "f", "timeout": -1}, {"method": "f", "timeout": "soon"}),
    ],
)
def test_invalid_bodies_are_refused(body: Any) -> None:
    engine = FakeEngine()
    refused(ask("POST", "/collective_rpc", engine, json=body))
    if body != {}:
        refused(ask("POST", "/abort_requests", engine, json=body))
    assert not engine.operation.calls


@pytest.mark.parametrize("body", [{}, {"request_ids": []}, {"request_ids": ["a", "b"]}])
def test_requests_are_aborted_by_id_or_all(body: dict[str, list[str]]) -> None:
    engine = FakeEngine()
    answer = ask("POST", "/abort_requests", engine, json=body).json()
    ids = body.get("request_ids", [])
    assert answer == {"status": "aborted", "aborted": len(ids)}
    assert engine.operation.calls == [("abort", *(ids or ["all"]))]


def test_collective_rpc_returns_results() -> None:
    engine = FakeEngine()
    body = {"method": "f", "args": [1, "a"], "kwargs": {"b": None}, "timeout": 2.5}
    assert ask("POST", "/collective_rpc", engine, json=body).json() == {"results": [7, "x"]}
    assert engine.operation.calls == [("collective_rpc", "f", 2.5, [1, "a"], {"b": None})]
    engine.operation.results = [object()]
    assert "is not JSON" in refused(ask("POST", "/collective_rpc", engine, json={"method": "f"}))["message"]


def test_weight_updates_reach_the_engine() -> None:
    engine = FakeEngine()
    calls = {
        "init_weight_transfer_engine": ({"init_info": {"a": 1}}, "Weight transfer initialized"),
        "start_weight_update": (None, "Weight update started"),
        "update_weights": ({"update_info": {"names": []}}, "Weights updated"),
        "finish_weight_update": ({"weight_version": "v2"}, "Weight update finished"),
    }
    for path, (body, message) in calls.items():
        assert ask("POST", f"/{path}", engine, json=body).json() == {"message": message}
    assert ask("POST", "/finish_weight_update", engine).status_code == 200
    reply = ask("POST", "/update_weight_version", engine, json={"new_version": "v3"})
    assert reply.json() == {"success": True, "new_version": "v3"}
    assert engine.operation.calls == [
        ("init_weight_transfer_engine", {"a": 1}),
        ("start_weight_update",),
        ("update_weights", {"names": []}),
        ("finish_weight_update", "v2"),
        ("finish_weight_update", None),
        ("update_weight_version", "v3"),
    ]
    for path in ("init_weight_transfer_engine", "update_weights", "update_weight_version"):
        refused(ask("POST", f"/{path}", engine, json={}))
    assert "draft" in refused(ask("POST", "/start_draft_weight_update", engine))["message"]


def test_answers_name_the_version_of_the_weights() -> None:
    """Catches a header for engines that no trainer updates."""
    engine = FakeEngine()
    assert "x-weight-version" not in ask("GET", "/version", engine).headers
    engine.operation.weight_version = "step-7"
    assert ask("GET", "/version", engine).headers["x-weight-version"] == "step-7"
    assert ask("GET", "/weight_info", engine).json() == {"weight_version": "step-7"}
    for path, field in (
        ("/update_weight_version", "new_version"),
        ("/finish_weight_update", "weight_version"),
    ):
        reply = ask("POST", path, engine, json={field: f"after-{path[1:]}"})
        assert reply.headers["x-weight-version"] == f"after-{path[1:]}"


def test_weight_updates_need_the_key() -> None:
    settings = {"api_key": ["secret"]}
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        body = {"json": {"update_info": {}}}
        assert ask("POST", path, settings=dict(settings), **body).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert ask("POST", path, settings=dict(settings), headers=key, **body).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("no"), 400), (EngineError("no"), 500), (EngineDead("no"), 503)]
)
def test_engine_errors_become_http_statuses(error: Exception, status: int) -> None:
    engine = FakeEngine()
    engine.operation.error = error
    for path in ("/sleep", "/wake_up", "/pause", "/resume"):
        assert refused(ask("POST", path, engine), status)["message"] == "no"


def test_server_info_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "INFO")
    reply = ask("GET", "/server_info?config_format=json")
    assert reply.json()["vllm_config"]["parallel"]["tensor_parallel_size"] == 2
    assert reply.json()["vllm_env"]["QUIRE_LOGGING_LEVEL"] == "INFO"
    assert "very-secret" not in reply.text
    text = ask("GET", "/server_info").json()["vllm_config"]
    assert "parallel.tensor_parallel_size=2" in text.splitlines()
    refused(ask("GET", "/server_info?config_format=yaml"))


def test_world_size() -> None:
    assert ask("GET", "/get_world_size").json() == {"world_size": 6}
    assert ask("GET", "/get_world_size?include_dp=false").json() == {"world_size": 2}


def test_tokenizer_info_needs_its_flag() -> None:
    assert ask("GET", "/tokenizer_info").status_code == 404
    reply_body = ask("GET", "/tokenizer_info", settings={"enable_tokenizer_info_endpoint": True}).json()
    assert reply_body["eos_token"] == "</s>" and "messages" in reply_body["chat_template"]
    assert {"content": "</s>", "special": True} in reply_body["added_tokens_decoder"].values()


def test_profile_routes_need_a_profiler_config() -> None:
    engine = FakeEngine()
    assert ask("POST", "/start_profile", engine).status_code == 404
    engine.operation.settings["observability"] = {"profiler_config": {"profiler": "torch"}}
    assert ask("POST", "/start_profile", engine).status_code == 200
    assert ask("POST", "/stop_profile", engine).status_code == 200
    assert engine.operation.calls == [("profile", True), ("profile", False)]


def test_encoder_and_media_caches_are_reset() -> None:
    engine = FakeEngine()
    assert ask("POST", "/reset_encoder_cache", engine).json() == {"success": False}
    assert ask("POST", "/reset_mm_cache", engine).json() == {"success": True}
    assert engine.operation.calls == [("reset_encoder_cache",), ("reset_mm_cache",)]
