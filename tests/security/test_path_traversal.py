"""Path traversal: `..`, links and file:// URLs that lead out of the directory that the operator opened.
Quire opens nothing for clients by default, resolves a path before it compares it, and checks the file that
it has opened. No advisory of vLLM has this class: it covers its options for local media, its adapter routes,
run-batch and the index of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from ask import ask, chat, complete, refused
from fake_engine import FakeEngine
from fake_inputs import engine_with_media, file_of, image_part, media, picture
from fake_openai import FakeServer
from oracle import make_tiny
from tiny import open_tiny

from quire.cli import main
from quire.errors import ConfigError

SECRET = "the secret of the operator"
LOAD = "/v1/load_lora_adapter"


def tree(tmp_path: Path) -> Path:
    """Make a directory that clients may read, with links that lead to a secret directory next to it."""
    root, secret = tmp_path / "open", tmp_path / "open-secret"
    for folder in (root, secret):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(SECRET)
        (folder / "image.png").write_bytes(file_of(picture()))
    (root / "link.png").symlink_to(secret / "image.png")
    (root / "up").symlink_to(tmp_path)
    return root


def send_image(engine: FakeEngine, url: str) -> Any:
    return chat(engine, messages=[{"role": "user", "content": [image_part(url)]}])


def test_media_are_read_only_below_the_allowed_directory(tmp_path: Path) -> None:
    root = tree(tmp_path)
    engine = engine_with_media(media(allowed_local_media_path=str(root)))
    assert send_image(engine, f"file://{root}/image.png").status_code == 200
    for path in (
        f"{root}/../open-secret/image.png",
        f"{root}/%2e%2e/open-secret/image.png",
        f"{root}/link.png",
        f"{root}/up/open-secret/image.png",
        f"{root}-secret/image.png",
        "/etc/passwd",
        "/proc/self/environ",
    ):
        error = refused(send_image(engine, f"file://{path}"), 422)
        assert "must be in the directory of `--allowed-local-media-path`" in error["message"], path
    assert len(engine.seen) == 1


def test_no_local_file_is_readable_by_default() -> None:
    for url in ("file:///etc/hostname", "FILE:///etc/hostname", "file://localhost/etc/hostname"):
        error = refused(send_image(engine_with_media(), url), 422)
        assert "Cannot load local files without `--allowed-local-media-path`" in error["message"]


def test_adapters_are_loaded_only_below_the_allowed_directory(tmp_path: Path) -> None:
    root = tree(tmp_path)
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def load(path: str, env: dict[str, str] = env) -> Any:
        engine = FakeEngine()
        engine.operation.settings["lora"] = {"enable_lora": True}
        settings = {"lora_roots": [str(root)]}
        body = {"lora_name": "x", "lora_path": path}
        return ask("POST", LOAD, engine=engine, settings=settings, env=env, json=body)

    assert load(str(root)).status_code == 200
    for path in (
        f"{root}/../open-secret",
        f"{root}-secret",
        f"{root}/up/open-secret",
        f"file://{root}/../open-secret",
        "/etc",
    ):
        refused(load(path), 403)
    assert load(str(root), env={}).status_code == 404, "the route exists only if the operator enables it"


@pytest.mark.parametrize("name", ["..", "../open-secret", "up/open-secret", "/", ".", "a\0b", "\\"])
def test_model_names_are_not_paths(name: str, tmp_path: Path) -> None:
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(tree(tmp_path))}
    engine = FakeEngine()
    engine.operation.settings["lora"] = {"enable_lora": True}
    refused(ask("POST", "/v1/completions", engine=engine, env=env, json={"prompt": "a", "model": name}), 404)
    assert not engine.adapters and complete(engine).status_code == 200


def test_run_batch_uses_known_routes_only(tmp_path: Path) -> None:
    urls = ["file:///etc/passwd", "http://169.254.169.254/", "/v1/../sleep", "/v1/load_lora_adapter"]
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": {"prompt": "a"}} for url in urls]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with FakeServer() as server:
        assert main(["run-batch", "-i", str(source), "-o", str(output), "--url", server.url]) == 0
        assert not server.requests
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(answer["response"] is None for answer in answers)
    assert all("unknown url" in answer["error"]["message"] for answer in answers)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors"])
def test_checkpoint_index_names_only_its_own_files(file: str, tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    (path / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": file}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: weight_map"):
        open_tiny(path)
