"""Tests that a rank reads only its shard of every file, equally from all file formats."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_files import make_tiny_gguf
from oracle import load_tiny, make_tiny
from safetensors.torch import load_file, save_file
from test_tensor_parallel_models import compare, logits
from threads import tp_worlds
from torch import Tensor

from quire.checkpoint.model import read_checkpoint
from quire.cli import main
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.layers.scope import Target
from quire.loader import gguf, safetensors
from quire.loader.safetensors import SafetensorsSource
from quire.quant.sharding import Shard

PARTS = {
    "rows": (0, (Shard(3, 3, 6),)),
    "columns": (1, (Shard(4, 4, 8),)),
    "columns in two parts": (1, (Shard(2, 2, 4), Shard(2, 2, 4))),
    "rows beyond the end": (0, (Shard(4, 4, 6),)),
    "last of three": (2, (Shard(5, 5, 10),)),
    "middle of three": (1, (Shard(4, 4, 8),)),
    "last of four": (3, (Shard(3, 0, 6),)),
}
SHAPES = {2: (6, 8), 3: (6, 8, 10), 4: (2, 3, 4, 6)}


def source_of(folder: Path) -> SafetensorsSource:
    return SafetensorsSource(SimpleNamespace(path=folder, quant=None), 0)  # type: ignore[arg-type]


def dims(name: str) -> int:
    return {"last of three": 3, "middle of three": 3, "last of four": 4}.get(name, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_shards_of_a_tensor(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Check dtype conversion, and a file with misaligned tensors."""
    axis, runs = PARTS[name]
    full = torch.randn(SHAPES[dims(name)]).to(torch.bfloat16)
    odd = torch.zeros(3, dtype=torch.uint8)
    save_file({"a": odd, "w": full}, tmp_path / "model.safetensors")
    source = source_of(tmp_path)
    shape = list(full.shape)
    shape[axis] = sum(run.size for run in runs)
    target = Target("w", torch.full(shape, torch.nan, dtype=dtype), axis, runs)
    source.fill(target)
    first, pieces = 0, []
    for run in runs:
        piece = full.narrow(axis, first + run.start, min(run.size, run.all - run.start))
        missing = list(shape)
        missing[axis] = run.size - piece.shape[axis]
        pieces += [piece, piece.new_zeros(missing)]
        first += run.all
    assert torch.equal(target.tensor, torch.cat(pieces, axis).to(dtype))


def test_only_the_shard_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all ranks together read each byte of sharded tensors once, and of the others once
    per rank.
    """
    path, _ = make_tiny("MixtralForCausalLM", tmp_path)
    stored = load_file(path / "model.safetensors")
    num_read: list[int] = []
    read = safetensors._read
    columns = SafetensorsSource._read_columns

    def counted(file: Any, into: Tensor) -> None:
        num_read.append(into.nbytes)
        read(file, into)

    def counted_columns(self: Any, file: Any, entry: Any, into: Tensor) -> None:
        num_read.append(into.numel() * entry.dtype.itemsize)
        columns(self, file, entry, into)

    monkeypatch.setattr(safetensors, "_read", counted)
    monkeypatch.setattr(SafetensorsSource, "_read_columns", counted_columns)
    for world in tp_worlds(2):
        load_tiny(path, world=world)
    full = [name for name in stored if "norm" in name or ".gate.weight" in name]
    expected = sum(tensor.nbytes * (2 if name in full else 1) for name, tensor in stored.items())
    assert sum(num_read) == expected


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000])
def test_mapped_columns_are_read_within_their_rows(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the last row of the last tensor, which must not exceed the file, and several pieces."""
    monkeypatch.setattr(safetensors, "_CHUNK_BYTES", chunk_bytes)
    full = torch.randn(2000, 8)
    save_file({"w": full}, tmp_path / "model.safetensors")
    target = Target("w", torch.empty(2000, 4), 1, (Shard(4, 4, 8),))
    source_of(tmp_path).fill(target)
    assert torch.equal(target.tensor, full[:, 4:])


def test_gguf_rows_are_read_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("needs the C kernels")
    path, _ = make_tiny_gguf("qwen3", tmp_path, "Q8_0", intermediate_size=128)
    num_bytes: dict[str, int] = {}
    packed = gguf.GGUFSource._packed

    def counted(source: Any, view: Any, axis: int = 0, span: slice = gguf._ALL) -> Any:
        actual = packed(source, view, axis, span)
        if span == gguf._ALL:
            return actual
        num_bytes[str(axis)] = num_bytes.get(str(axis), 0) + actual.nbytes
        assert actual.base is not None, "a copy of more than the shard"
        return actual

    monkeypatch.setattr(gguf.GGUFSource, "_packed", counted)
    load_tiny(path, world=tp_worlds(2)[1], packed=True)
    row = 34 * 2  # bytes of 64 numbers
    ends, heads, up = 2 * 64 * row, 2 * (32 + 2 * 16) * row, 2 * 2 * 64 * row
    assert num_bytes == {"0": ends + heads + up, "1": 2 * (64 * 34 + 64 * 34 * 2)}


def test_shape_errors_name_the_full_shape(tmp_path: Path) -> None:
    path, _ = make_tiny("LlamaForCausalLM", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 80)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"down_proj.weight has the shape \(64, 80\), .* says \(64, 96\)"):
        load_tiny(path, world=tp_worlds(2)[1])


def test_pickled_weights(tmp_path: Path) -> None:
    path, model = make_tiny("GPT2LMHeadModel", tmp_path)
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    compare(path, 2)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "GptOssForCausalLM", "GPT2LMHeadModel"])
def test_dummy_weights_do_not_depend_on_sharding(family: str, tmp_path: Path) -> None:
    path, _ = make_tiny(family, tmp_path)
    compare(path, 2, load_format="dummy")


def test_state_is_saved_for_each_rank(tmp_path: Path) -> None:
    path, _ = make_tiny("LlamaForCausalLM", tmp_path, attention_bias=True)
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--device", "cpu", "-tp", "2"]
    assert main(["save-sharded-state", str(path), "-o", str(tmp_path / "state"), *flags]) == 0
    for rank in range(2):
        assert (tmp_path / "state" / f"model-rank-{rank}-part-0.safetensors").is_file()
    expected = logits(path, 2)
    for actual, reference in zip(logits(tmp_path / "state", 2), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(actual, reference, strict=True))
    with pytest.raises(ConfigError, match="saved for tensor_parallel_size 2, but this engine has 1"):
        logits(tmp_path / "state", 1)
    assert read_checkpoint(tmp_path / "state").facts.heads == 4
