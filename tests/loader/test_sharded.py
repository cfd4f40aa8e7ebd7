"""Tests of saved engine states: written, read again, and rejected by another engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from requantized import requantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant import ONLINE
from quire.cli import main
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.loader import sharded
from quire.loader.shards import STATE
from quire.quant.unquantized import PlainWeight

FAMILIES = ["gemma3_text", "gpt_neox", "gpt_oss", "cohere", "qwen3_5_moe_text"]
"""Norms with 1 added, permuted heads, interleaved experts, split heads, tied embeddings, and decay rates."""


def save(path: Path, to: Path, *more: str) -> int:
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--device", "cpu", *more]
    return main(["save-sharded-state", str(path), "-o", str(to), *flags])


def logits(path: Path, **options: Any) -> Tensor:
    return run_paged(load_tiny(path, **options), [random_prompts(12)[0]], [[12]])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_state_computes_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check values that are changed after loading, which must not be changed twice, and missing
    parameters.
    """
    monkeypatch.setattr(sharded, "_PART_BYTES", 50_000)
    path, _ = make_tiny(family, tmp_path)
    out = tmp_path / "state"
    assert save(path, out) == 0
    assert len(list(out.glob("model-rank-0-part-*.safetensors"))) > 2
    expected = logits(path)
    for load_format in ("sharded_state", "auto"):
        assert torch.equal(logits(out, load_format=load_format), expected)


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 block", "int8 channel", "nf4"])
def test_quantized_weights_are_saved_as_stored(name: str, family: str, tmp_path: Path) -> None:
    path, _ = requantize(family, tmp_path, *STORED[name], **SIZES[family])
    assert save(path, tmp_path / "state") == 0
    quant = read_checkpoint(path).quant
    assert torch.equal(logits(tmp_path / "state", quant=quant), logits(path, quant=quant))


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_bfloat16_weights_are_saved_as_bfloat16(method: str, tmp_path: Path) -> None:
    if method == "int8" and native.library() is None:
        pytest.skip("needs the C kernels")
    path, _ = make_tiny("llama", tmp_path, **SIZES["llama"])
    assert save(path, tmp_path / "state", "--quantization", method) == 0
    narrow, wide = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (tmp_path / "state", path)
    )
    assert narrow < 0.75 * wide
    quant = ONLINE[method]
    assert torch.equal(logits(tmp_path / "state", quant=quant), logits(path, quant=quant))


class TransposedLinear(PlainWeight):
    """Stores its weight transposed, under another name."""

    def repack(self) -> None:
        self.turned = torch.nn.Parameter(self.weight.t().contiguous(), requires_grad=False)
        self.weight = None  # type: ignore[assignment]

    def find_kernels(self) -> None:
        assert self.weight is None
        self.product = lambda x: x @ self.turned if self.bias is None else x @ self.turned + self.bias


def test_repacked_weights_are_not_repacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_tiny("llama", tmp_path)
    expected = logits(path)

    def linear(self: Any, parts: tuple[str, ...], shape: Any) -> PlainWeight:
        return PlainWeight(shape) if "embed" in parts[0] else TransposedLinear(shape)

    monkeypatch.setattr("quire.quant.unquantized.PlainFormat.linear", linear)
    assert save(path, tmp_path / "state") == 0
    monkeypatch.delattr(TransposedLinear, "repack")
    torch.testing.assert_close(logits(tmp_path / "state"), expected, atol=1e-4, rtol=1e-4)


def test_state_with_unknown_modules_is_rejected(tmp_path: Path) -> None:
    """Check a state that was saved when a module had another name."""
    path, _ = make_tiny("llama", tmp_path)
    assert save(path, tmp_path / "state") == 0
    (file,) = (tmp_path / "state").glob("*.safetensors")
    tensors = load_file(file)
    tensors["former.weight"] = tensors.pop("norm.weight")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"former\.weight.*save it again"):
        logits(tmp_path / "state")


def test_state_of_another_engine_is_rejected(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    out = tmp_path / "state"
    assert save(path, out) == 0
    output = json.loads((out / STATE).read_text())
    for name, other in {"dtype": "float16", "device": "cuda", "version": 0, "quantization": "fp8"}.items():
        (out / STATE).write_text(json.dumps(output | {name: other}))
        with pytest.raises(ConfigError, match=rf"saved for {name} {other!r}, but .*save it again with"):
            load_tiny(out)
    (out / STATE).unlink()
    with pytest.raises(ConfigError, match="make one with `quire save-sharded-state"):
        load_tiny(out, load_format="sharded_state")


def test_unsupported_saves_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check weights whose `finish` may keep more than parameters, and a directory that is not empty."""
    path, _ = make_tiny("llama", tmp_path)
    assert save(path, path) == 1
    assert "not an empty directory" in capsys.readouterr().err
    monkeypatch.setattr(PlainWeight, "finish", PlainWeight.find_kernels)
    assert save(path, tmp_path / "state") == 1
    assert "weights of the kind PlainWeight cannot be saved" in capsys.readouterr().err
