"""Tests of `quire serve s3://...`: a server downloads its model, and starts again from its cache."""

from pathlib import Path

import pytest
from fake_s3 import serve_s3
from serve_process import Start
from tiny_text import TextModel


@pytest.mark.slow
def test_model_of_a_bucket_is_served(
    start: Start, tiny: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 4, "temperature": 0}
    with serve_s3("models") as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        files = [path for path in Path(tiny.path).rglob("*") if path.is_file()]
        store.objects = {f"tiny/{path.relative_to(tiny.path)}": path.read_bytes() for path in files}
        texts, sent = [], []
        for _ in range(2):
            cache = "--download-dir", str(tmp_path / "cache")
            server = start(*cache, model="s3://models/tiny", fresh=True)
            server.until_healthy()
            texts.append(server.client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            sent.append(store.num_bytes_sent)
    assert sent[0] >= max(path.stat().st_size for path in files) and sent[1] == sent[0]
    server = start()
    server.until_healthy()
    texts.append(server.client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    assert len(set(texts)) == 1 and texts[0]
