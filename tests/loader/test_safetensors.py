"""Tests of reading safetensors: directly, in pieces, by several threads, and truncated meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, make_tiny
from safetensors.torch import load_file, save_file

from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError
from quire.layers.norm import Norm
from quire.layers.scope import Target
from quire.loader import safetensors as reading
from quire.loader.safetensors import SafetensorsSource


@pytest.fixture
def source(tmp_path: Path) -> tuple[SafetensorsSource, dict[str, torch.Tensor]]:
    path, _ = make_tiny("llama", tmp_path)
    tensors = {
        "bfloat16": torch.randn(37, 5).bfloat16(),
        "one": torch.tensor(3.5),
        "int32": torch.randint(-9, 9, (7, 3, 2), dtype=torch.int32),
        "float8": torch.randn(4, 6).to(torch.float8_e4m3fn),
        "nothing": torch.zeros(0, 4),
    }
    save_file(tensors, path / "model.safetensors")
    return SafetensorsSource(read_checkpoint(path), 0), tensors


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[]", "not a whole safetensors file"),
        (b'{"a": 1}', "not a whole safetensors file"),
        (b"[" * 100_000, "not a whole safetensors file"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "the bytes of a are not where"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "the bytes of a are not where"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "it has .* but its header lists"),
        (b'{"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}', "is 'F7'; known: F64"),
    ],
)
def test_corrupt_header_is_reported(header: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=problem):
        reading.entries_of(file)


def test_metadata_may_have_any_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, file, metadata={"shape": "x", "dtype": "y"})
    assert list(reading.entries_of(file)) == ["a"]


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
def test_tensors_of_any_dtype_and_destination(
    source: tuple[SafetensorsSource, dict[str, torch.Tensor]],
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check misplaced rows, wrong dtypes, and noncontiguous views."""
    monkeypatch.setattr(reading, "_CHUNK_BYTES", chunk_bytes)
    actual, tensors = source
    assert actual.shapes({}) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        wide = torch.empty(tensor.shape or (1,), dtype=torch.float32)
        for into in (torch.empty_like(tensor), wide):
            actual.fill(Target(name, into))
            assert torch.equal(into.float().view(tensor.shape), tensor.float()), name
        if tensor.ndim == 2:
            turned = torch.empty(*tensor.shape[::-1], dtype=tensor.dtype)
            actual.fill(Target(name, turned.t()))
            assert torch.equal(turned.t().float(), tensor.float())


def test_file_truncated_after_opening_is_named(
    source: tuple[SafetensorsSource, dict[str, torch.Tensor]],
) -> None:
    actual, tensors = source
    path = actual.entries["bfloat16"].path
    path.write_bytes(path.read_bytes()[:-1])
    last = max(actual.entries, key=lambda name: actual.entries[name].offset)
    with pytest.raises(ConfigError, match=rf"cannot read {last} from .*safetensors: unexpected end of file"):
        actual.fill(Target(last, torch.empty_like(tensors[last])))


def test_layer_is_finished_once_after_all_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a norm is not finished while a thread still reads it, or twice."""
    path, _ = make_tiny("llama", tmp_path)
    stored = load_file(path / "model.safetensors")
    seen: list[tuple[str, bool]] = []

    def finish(self: Any) -> None:
        name = next(self.targets()).name
        seen.append((name, torch.equal(self.weight, stored[name])))

    monkeypatch.setattr(Norm, "finish", finish)
    monkeypatch.setattr("quire.layers.norm.RMSNorm.finish", finish)
    load_tiny(path)
    assert sorted(seen) == sorted((name, True) for name in stored if "norm" in name)
