"""Tests of what engines that exchange prefixes must have in common."""

from pathlib import Path

import pytest

from quire.config import kv_identity
from quire.config.kv_identity import _contents, weight_files


def test_weights_are_compared_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for number, (name, data) in enumerate(
        [
            ("model.safetensors", bytes(5000)),
            ("model.safetensors", bytes(4999) + b"\1"),
            ("model.safetensors", bytes(4999)),
            ("pytorch_model.bin", bytes(5000)),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(data)
        (folder / "config.json").write_text(str(number))
        digests.append(_contents(folder))
    assert digests[0] == digests[3], "one file may have any name"
    assert len({*digests}) == 3
    assert _contents(tmp_path / "0" / "model.safetensors") == digests[0]
    monkeypatch.setattr(kv_identity, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(kv_identity, "_STRIDE", 1000)
    monkeypatch.setattr(kv_identity, "_SAMPLE_BYTES", 10)
    whole = _contents(tmp_path / "0")
    for at, is_sampled in ((3000, True), (3005, True), (3500, False)):
        data = bytearray(5000)
        data[at] = 1
        (tmp_path / "0" / "model.safetensors").write_bytes(data)
        assert (_contents(tmp_path / "0") != whole) == is_sampled


def test_parts_of_a_gguf_file_belong_together(tmp_path: Path) -> None:
    names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"]
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path / names[0])] == names[:2]
    assert [file.name for file in weight_files(tmp_path / "b.gguf")] == ["b.gguf"]
