"""Models at s3:// URLs, read by s3fs from a small S3 server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_s3 import FakeS3, serve_s3

from quire.checkpoint import object_store
from quire.checkpoint.hub import locate
from quire.errors import ConfigError, RequestError
from quire.server.lora.locations import LoRALocations

s3fs = pytest.importorskip("s3fs")

WEIGHTS = bytes(range(256)) * 10


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeS3]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 1000)
    with serve_s3("models") as store:
        store.objects = {"m/": b"", "m/config.json": b"{}", "m/model.safetensors": WEIGHTS, "n/x": b""}
        for name, value in {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "eu-central-1",
            "AWS_CONFIG_FILE": str(tmp_path / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # it has the variables of an earlier test
        yield store
        s3fs.S3FileSystem.clear_instance_cache()


def fetch(url: str, tmp_path: Path) -> Path:
    return locate(url, cache_root=tmp_path, progress=False)


def test_model_is_read_in_ranges_and_kept(s3: FakeS3, tmp_path: Path) -> None:
    folder = fetch("s3://models/m", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_bytes() == b"{}"
    assert s3.num_bytes_sent == len(WEIGHTS) + 2
    assert fetch("s3://models/m", tmp_path) == folder and s3.num_bytes_sent == len(WEIGHTS) + 2
    s3.objects["m/config.json"] = b"[]"
    changed = fetch("s3://models/m", tmp_path)
    assert (changed / "config.json").read_bytes() == b"[]" and s3.num_bytes_sent == len(WEIGHTS) + 4


def test_adapter_is_read_by_the_same_code(s3: FakeS3, tmp_path: Path) -> None:
    s3.objects |= {"a/adapter_config.json": b"{}", "a/adapter_model.safetensors": WEIGHTS, "a/other": b"x"}
    folder = LoRALocations(cache=tmp_path, max_bytes=10_000).for_operator("s3://models/a")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(RequestError, match="--lora-max-download-bytes"):
        LoRALocations(cache=tmp_path, max_bytes=100).for_operator("s3://models/a")


def test_missing_objects_are_refused(s3: FakeS3, tmp_path: Path) -> None:
    for url, words in (
        ("s3://none/m", "does not exist.*check the bucket"),
        ("s3://models/none", "holds no files: check the bucket and the path"),
        ("s3://models/n", "neither a config.json nor a .gguf file"),
        ("s3://models/m/config.json", "is one file"),
        ("s3://models/m/x.gguf", "x.gguf does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            fetch(url, tmp_path)


def test_missing_credentials_are_refused(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="without credentials.*AWS_ACCESS_KEY_ID"):
        fetch("s3://models/m", tmp_path)


def test_region_variables_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Botocore reads only AWS_DEFAULT_REGION."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert object_store._options("s3")["client_kwargs"] == {"region_name": "eu-central-1"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    assert "client_kwargs" not in object_store._options("s3")
    assert object_store._options("gs") == {}
