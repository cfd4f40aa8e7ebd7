"""Adapters at URLs that a client names: a URL that leads out of the allowed store, an archive inside another
file, or a file larger than the store reports. Quire accepts only URLs below an allowed one, refuses `::` and
ambiguous paths, and never reads more bytes than the store reports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from ask import ask, refused
from fake_engine import FakeEngine

MAX_BYTES = 4000
STORE = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    for folder in ("open/good", "secret/hers", "opened/hers"):
        STORE.pipe({f"/{folder}/adapter_config.json": b"{}", f"/{folder}/adapter_model.bin": b"weights"})
    yield
    for folder in ("open", "secret", "opened"):
        STORE.rm(f"/{folder}", recursive=True)


def load(url: str) -> tuple[Any, FakeEngine]:
    engine = FakeEngine()
    engine.operation.settings["lora"] = {"enable_lora": True}
    settings = {"lora_resolver_dir": "memory://open/", "lora_max_download_bytes": MAX_BYTES}
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    body = {"lora_name": "x", "lora_path": url}
    return ask("POST", "/v1/load_lora_adapter", engine=engine, settings=settings, env=env, json=body), engine


def downloaded(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.rglob("adapter_*")]


def test_adapter_of_the_allowed_store_is_loaded(tmp_path: Path) -> None:
    reply, engine = load("memory://open/good")
    assert reply.status_code == 200 and list(engine.adapters) == ["x"]
    assert sorted(downloaded(tmp_path)) == ["adapter_config.json", "adapter_model.bin"]


@pytest.mark.parametrize(
    "url",
    [
        "memory://secret/hers",
        "memory://opened/hers",
        "memory://open/../secret/hers",
        "memory://open/%2e%2e/secret/hers",
        "memory://open/./good",
        "memory://open/good?versionId=1",
        "memory://open/good#x",
        "memory://open/..\\secret\\hers",
        "zip://hers::memory://open/good",
        "memory://open/good::memory://secret/hers",
        "tar://a::http://169.254.169.254/",
        "http://169.254.169.254/latest",
        "file:///etc",
    ],
)
def test_urls_outside_the_allowed_store_are_refused(url: str, tmp_path: Path) -> None:
    reply, engine = load(url)
    refused(reply, 403)
    assert not engine.adapters and not downloaded(tmp_path)


@pytest.mark.parametrize("lies", [False, True])
def test_download_size_is_bounded(lies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is refused whether the store reports the true size or a smaller one."""
    STORE.pipe("/open/good/adapter_model.bin", b"x" * (MAX_BYTES + 1))
    info = type(STORE).info
    if lies:
        monkeypatch.setattr(type(STORE), "info", lambda *args, **more: {**info(*args, **more), "size": 1})
    reply, engine = load("memory://open/good")
    words = "does not have the 1 bytes that the store reports" if lies else "--lora-max-download-bytes"
    assert words in refused(reply)["message"]
    assert not engine.adapters and "adapter_model.bin" not in downloaded(tmp_path)
    assert lies or not downloaded(tmp_path), "a file known to be too large is not fetched"
