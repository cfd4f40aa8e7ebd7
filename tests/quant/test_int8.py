"""Tests of INT8 weights: from checkpoints, and quantized while loading."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import compressed, pack_int8
from oracle import load_tiny, make_tiny
from products import exact_product
from requantized import error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import ONLINE
from quire.checkpoint.quant.schemes import Int8
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.reference.int8 import Int8Codes, fits_blocks, quantize
from quire.kernels.reference.moe import ExpertWeights, mix
from quire.quant.experts import ExpertShape
from quire.quant.int8 import Int8Experts, Int8Format, Int8Weight
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = LinearShape(64, (24, 8, 16), True, torch.float32, CPU)


@pytest.mark.parametrize("by", ["tensor", "channel"])
@pytest.mark.parametrize("family", ["qwen2", "nemotron_h"])
def test_logits_of_a_checkpoint(family: str, by: str, tmp_path: Path) -> None:
    """Check a scale below float16, a bias, and experts without a gate."""
    config = compressed("int-quantized", "int", by)
    path, twin = requantize(family, tmp_path, config, partial(pack_int8, by, False))
    model = loaded(path)
    assert any(isinstance(module, Int8Weight) for module in model.modules())
    assert error_of(model, twin) < 2e-3


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_logits_with_online_quantization(family: str, tmp_path: Path) -> None:
    path, twin = make_tiny(family, tmp_path)
    model = load_tiny(path, quant=ONLINE["int8"])
    kinds = {type(module) for module in model.modules()}
    assert Int8Weight in kinds and (family == "llama") != (Int8Experts in kinds)
    assert error_of(model, twin) < 5e-2  # error of rounding the weights alone, which the reference does not


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("size_in", [64, 40])
def test_parts_with_different_scales(
    native_kernels: bool, size_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that widths not divisible by blocks, and machines without kernels, use unpacked weights."""
    if not native_kernels:
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    shape = LinearShape(size_in, SHAPE.sizes_out, True, torch.float32, CPU)
    weight = Int8Format(Int8("tensor"), PlainFormat()).linear(("q", "k", "v"), shape)
    wide, biases = [], []
    for i, part in enumerate(weight.parts()):
        codes = part["weight"].tensor.random_(-127, 127)
        scale = part["weight_scale"].tensor.fill_(0.01 * 3**i)
        wide.append(codes.float() * scale)
        biases.append(part["bias"].tensor.normal_().clone())
    weight.finish()
    x = torch.randn(3, size_in)
    expected = x @ torch.cat(wide).T + torch.cat(biases)
    torch.testing.assert_close(weight(x), expected, rtol=1e-3, atol=1e-3)
    ids = torch.tensor([30, 2])
    assert weight.rows is not None
    torch.testing.assert_close(weight.rows(ids), torch.cat(wide)[ids], rtol=1e-3, atol=0)


def test_scale_below_float16_is_not_packed_in_blocks() -> None:
    codes = torch.randint(-127, 127, (4, 32), dtype=torch.int8)
    assert fits_blocks(Int8Codes(codes, torch.full((4,), 3e-4))) and not fits_blocks(
        Int8Codes(codes, torch.full((4,), 1e-7))
    )
    assert fits_blocks(Int8Codes(torch.zeros_like(codes), torch.full((4,), 1e-7)))
    assert not fits_blocks(Int8Codes(codes, torch.full((4,), 1e6)))


def test_online_quantization_keeps_small_and_large_outputs() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 64) * torch.tensor([1e-6, 1e-3, 0.0, 1.0, 10.0, 1e4])[:, None]
    codes = quantize(weight)
    assert fits_blocks(codes)
    error = (codes.widened(torch.float32) - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-30)
    assert (error[1:] < 1e-2).all() and error[0] < 0.2


def test_only_one_layer_is_wide_at_a_time() -> None:
    """Check that loading takes no more memory than quantization saves."""
    torch.manual_seed(0)
    weight = Int8Format(Int8(stored=False), PlainFormat()).linear(("q", "k", "v"), SHAPE)
    assert sum(parameter.untyped_storage().nbytes() for parameter in weight.parameters()) < 1000
    weight.begin()
    for part in weight.parts():
        part["weight"].tensor.normal_()
        part["bias"].tensor.zero_()
    values = torch.cat([part["weight"].tensor for part in weight.parts()])
    weight.finish()
    cache_dtype = torch.float32 if native.library() is None else torch.uint8
    assert {parameter.dtype for name, parameter in weight.named_parameters() if name != "bias"} == {
        cache_dtype
    }
    x = torch.randn(2, 64)
    torch.testing.assert_close(weight(x), exact_product(x, quantize(values)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("by", ["tensor", "channel"])
def test_experts(by: Any, native_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for swapped scales of gate and up, and lost biases."""
    if not native_kernels:
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    shape = ExpertShape(3, 64, 32, "silu", True, torch.float32, CPU)
    experts = Int8Format(Int8(by), PlainFormat()).experts(("gate", "up", "down"), shape)
    wide = []
    for name in ("gate", "up", "down"):
        part = experts.parts()[name]
        codes = part["weight"].tensor.random_(-127, 127)
        scales = part["weight_scale"].tensor.uniform_(1e-4, 3e-3)
        wide.append(codes.float() * scales)
    biases = [experts.bias_parts()[name].tensor.normal_().clone() for name in ("gate_up", "down")]
    experts.finish()
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2], [0, 1]], dtype=torch.int32)
    expected = mix(x, ids, weights, ExpertWeights(torch.cat(wide[:2], 1), wide[2], *biases), "silu")
    assert (experts(x, ids, weights) - expected).norm() / expected.norm() < 1e-3


def close(actual: Tensor, expected: Tensor, limit: float = 1.5e-2) -> None:
    assert actual.dtype == torch.bfloat16
    assert (actual.double().cpu() - expected.double()).norm() / expected.double().norm() < limit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", [Int8("tensor", "static"), Int8("channel", "none", stored=False)], ids=str)
def test_in_bfloat16_on_every_device(scheme: Int8, device: str) -> None:
    """Check one row, few rows and many rows."""
    torch.manual_seed(0)
    shape = LinearShape(256, (64, 32), False, torch.bfloat16, torch.device(device))
    weight = Int8Format(scheme, PlainFormat()).linear(("gate", "up"), shape)
    weight.begin()
    wide = []
    for i, part in enumerate(weight.parts()):
        if scheme.stored:
            codes = torch.randint(-127, 128, part["weight"].tensor.shape, dtype=torch.int8)
            part["weight_scale"].tensor.fill_(0.002 * 3**i)
            part["input_scale"].tensor.fill_(5 / 127)
            wide.append(codes.float() * 0.002 * 3**i)
            part["weight"].tensor.copy_(codes)
        else:
            wide.append(torch.randn(part["weight"].tensor.shape).bfloat16().float())
            part["weight"].tensor.copy_(wide[-1])
    weight.finish()
    for num in (1, 2, 40, 100, 600):
        x = torch.randn(num, 256).clamp(-5, 5).bfloat16()
        close(weight(x.to(device)), x.float() @ torch.cat(wide).T)


@pytest.mark.parametrize("device", DEVICES)
def test_online_quantized_experts_in_bfloat16_on_every_device(device: str) -> None:
    torch.manual_seed(0)
    shape = ExpertShape(3, 64, 32, "silu", False, torch.bfloat16, torch.device(device))
    experts = Int8Format(Int8("channel", "none", stored=False), PlainFormat()).experts(("g", "d"), shape)
    experts.begin()
    wide = []
    for name in ("gate_up", "down"):
        tensor = experts.parts()[name]["weight"].tensor
        wide.append((torch.randn(tensor.shape) / 8).bfloat16().float())
        tensor.copy_(wide[-1])
    experts.finish()
    for num in (1, 70):
        x, ids = torch.randn(num, 64).bfloat16(), torch.rand(num, 3).topk(2).indices.to(torch.int32)
        weights = torch.rand(num, 2)
        actual = experts(x.to(device), ids.to(device), weights.to(device))
        # An 8-bit code is within 1/254 of the largest weight, about 6e-3 of a typical one; three weights are
        # multiplied. Without kernels, weights are also rounded to bfloat16.
        close(actual, mix(x.float(), ids, weights, ExpertWeights(*wide), "silu"), 2.5e-2)


def test_gate_and_up_with_one_scale_are_rejected() -> None:
    shape = ExpertShape(3, 64, 32, "silu", False, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"gate_up .*one scale for both.*for each output"):
        Int8Format(Int8("tensor"), PlainFormat()).experts(("gate_up", "down"), shape)
