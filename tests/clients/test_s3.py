"""Tests of models and adapters in a bucket of moto, an S3 server of other authors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_process import ServeProcess
from tiny_adapter import write_adapter
from tiny_text import TextModel, text_model

from quire.cli import main

pytestmark = pytest.mark.slow

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Start a server with an empty bucket `models`; yield boto3's client of it."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(name, value)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        store = boto3.client("s3", region_name=KEYS["AWS_REGION"])
        store.create_bucket(Bucket="models")
        yield store
    server.stop()


def upload(client: Any, folder: Path, prefix: str) -> None:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(str(path), "models", f"{prefix}/{path.relative_to(folder)}")


def answers(server: ServeProcess) -> list[str]:
    return [
        server.complete(model=name, prompt="a b c", max_tokens=8, temperature=0)["choices"][0]["text"]
        for name in ("tiny", "sql")
    ]


def test_model_and_adapter_of_a_bucket_are_served(client: Any, tiny: TextModel, tmp_path: Path) -> None:
    """The answers are those of the same files on the disk; a second start needs no store."""
    write_adapter(tmp_path / "sql", json.loads((tiny.path / "config.json").read_text()), seed=1)
    upload(client, tiny.path, "tiny")
    upload(client, tmp_path / "sql", "adapters/sql")
    url = "s3://models/tiny", "s3://models/adapters/sql"
    # An empty cache has no compiled kernels; torch needs none.
    fresh = {"QUIRE_CACHE_ROOT": str(tmp_path / "cache"), "QUIRE_CPU_KERNELS": "torch"}
    places: list[tuple[str, str, dict[str, str]]] = [
        (str(tiny.path), str(tmp_path / "sql"), fresh),
        (*url, fresh),
        (*url, fresh | {"HF_HUB_OFFLINE": "1", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}),
    ]
    texts = []
    for number, (model, adapter, env) in enumerate(places):
        flags = ("--served-model-name", "tiny", "--enable-lora", "--lora-modules", f"sql={adapter}")
        with ServeProcess(model, *flags, log=tmp_path / f"log{number}", env=env) as server:
            server.until_healthy()
            texts.append(answers(server))
            server.end_cleanly()
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 2


def test_large_file_is_read_in_parallel_ranges(client: Any, tmp_path: Path, capsys: Any) -> None:
    """Check 40 MiB, which is three ranges."""
    weights = np.random.default_rng(0).bytes(40 << 20)
    client.put_object(Bucket="models", Key="large/config.json", Body=b"{}")
    client.put_object(Bucket="models", Key="large/model.safetensors", Body=weights)
    assert main(["download", "s3://models/large", "--download-dir", str(tmp_path)]) == 0
    folder = Path(capsys.readouterr().out.strip().splitlines()[-1])
    assert (folder / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://nowhere/m", "does not exist"),
        ("s3://models/none", "holds no files: check the bucket and the path"),
    ],
)
def test_missing_places_are_one_line_errors(client: Any, url: str, words: str, capsys: Any) -> None:
    assert main(["download", url]) == 1
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown
