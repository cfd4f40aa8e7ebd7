"""Tests of AWQ, GPTQ and packed compressed-tensors weights: from file tensors to logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from group_files import quantize_files, rounded, shuffled, stored, values
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.schemes import Grouped
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.tape import record
from quire.kernels.reference.int4 import Gather
from quire.kernels.reference.moe import ExpertWeights, mix
from quire.quant.experts import ExpertShape
from quire.quant.int4 import Int4Format
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape, Weight

CPU = torch.device("cpu")
AWQ = Grouped(4, 32, symmetric=False, act_order=False, layout="awq")
GPTQ = Grouped(4, 32, symmetric=True, act_order=False, layout="gptq")
SCHEMES = {
    "awq": AWQ,
    "awq all": replace(AWQ, group=-1),
    "gptq": GPTQ,
    "gptq act-order": replace(GPTQ, act_order=True),
    "gptq v2 zeros": replace(GPTQ, layout="gptq_v2", symmetric=False, group=64),
    "gptq 8": replace(GPTQ, bits=8, group=-1),
    "gptq 8 zeros": replace(GPTQ, bits=8, symmetric=False),
    "packed": replace(GPTQ, layout="compressed"),
    "packed zeros": replace(GPTQ, layout="compressed", symmetric=False, act_order=True),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
}
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


def linear_of(scheme: Grouped, sizes: tuple[int, ...], inputs: int = 128, **options: Any) -> Weight:
    shape = LinearShape(inputs, sizes, options.pop("bias", False), torch.float32, CPU)
    return Int4Format(scheme, PlainFormat()).linear(tuple(map(str, range(len(sizes)))), shape)


def fill(weight: Weight, scheme: Grouped, *, same_order: bool = False) -> torch.Tensor:
    """Fill with random parts, each with its own scales, and return their values."""
    generator, full = torch.Generator().manual_seed(0), []
    group_of = shuffled(weight.shape.size_in, scheme.group, generator)
    for i, (part, outputs) in enumerate(zip(weight.parts(), weight.shape.sizes_out, strict=True)):
        plain = torch.randn(outputs, weight.shape.size_in, generator=generator) * 3**i + 0.3
        if i and not same_order:
            group_of = shuffled(weight.shape.size_in, scheme.group, generator)
        groups = group_of if scheme.act_order else None
        codes = rounded(plain, scheme, groups)
        for suffix, tensor in stored(codes, scheme, groups).items():
            if suffix in part:
                part[suffix].tensor.copy_(tensor)
        if "bias" in part:
            part["bias"].tensor.copy_(torch.randn(outputs, generator=generator))
        full.append(values(codes, groups))
    return torch.cat(full)


def close(actual: torch.Tensor, expected: torch.Tensor, limit: float = 2e-3) -> None:
    error = (actual - expected).norm() / expected.norm()
    assert error < limit, error


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needs_native), False])
def test_fused_layer_whose_parts_have_their_own_scales(
    name: str, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for swapped codes, zero points off by one, and inputs in another part's order."""
    if not in_c:
        monkeypatch.setattr(native, "library", lambda: None)
    scheme = SCHEMES[name]
    weight = linear_of(scheme, (48, 16, 24), bias=True)
    expected = fill(weight, scheme)
    biases = torch.cat([part["bias"].tensor for part in weight.parts()]).clone()
    orders = [torch.randperm(size) for size in weight.shape.sizes_out]
    weight.reorder(orders)
    rows = torch.cat([order + start for order, start in zip(orders, (0, 48, 64), strict=True)])
    weight.finish()
    x = torch.randn(5, 128)
    close(weight(x), x @ expected[rows].T + biases[rows])


@needs_native
def test_parts_in_one_order_are_one_matmul_on_the_tape() -> None:
    scheme = SCHEMES["gptq act-order"]
    weight = linear_of(scheme, (48, 16))
    expected = fill(weight, scheme, same_order=True)
    weight.finish()
    x = torch.randn(3, 128)
    with record() as tape:
        y = weight(x)
    assert tape.complete and len(tape) == 2
    close(y, x @ expected.T)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather(dtype: torch.dtype) -> None:
    x, order = torch.randn(3, 40).to(dtype)[:, 3:], torch.randperm(37)
    assert torch.equal(Gather(order)(x), x[:, order])


@needs_native
def test_packed_weights_stay_packed_in_memory() -> None:
    for name, most in {"awq": 0.18, "gptq": 0.16, "gptq 8": 0.29}.items():
        weight = linear_of(SCHEMES[name], (64,), 256)
        fill(weight, SCHEMES[name])
        weight.finish()
        kept = sum(parameter.nbytes for parameter in weight.parameters())
        assert kept <= 64 * 256 * 4 * most + 256


@needs_native
@pytest.mark.parametrize("name", ["awq", "gptq 8", "gptq act-order", "packed"])
def test_experts(name: str) -> None:
    """Check for swapped experts and inputs in another expert's order."""
    scheme, (num, hidden, inner) = SCHEMES[name], (3, 128, 64)
    shape = ExpertShape(num, hidden, inner, "silu", False, torch.float32, CPU)
    experts = Int4Format(scheme, PlainFormat()).experts(("gate_proj", "up_proj", "down_proj"), shape)
    generator, full = torch.Generator().manual_seed(0), {}
    for part, pieces in experts.parts().items():
        outputs, inputs = (hidden, inner) if part == "down" else (inner, hidden)
        full[part] = torch.empty(num, outputs, inputs)
        for expert in range(num):
            group_of = shuffled(inputs, scheme.group, generator) if scheme.act_order else None
            codes = rounded(torch.randn(outputs, inputs, generator=generator), scheme, group_of)
            for suffix, tensor in stored(codes, scheme, group_of).items():
                if suffix in pieces:
                    pieces[suffix].tensor[expert].copy_(tensor)
            full[part][expert] = values(codes, group_of)
    experts.finish()
    x, ids = torch.randn(6, hidden), torch.randint(0, num, (6, 2), dtype=torch.int32)
    weights = torch.rand(6, 2)
    plain = ExpertWeights(torch.cat((full["gate"], full["up"]), 1), full["down"])
    close(experts(x, ids, weights), mix(x, ids, weights, plain, "silu"))


@needs_native
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "awq"),
        ("qwen2", "gptq act-order"),
        ("llama", "gptq"),
        ("qwen3_moe", "awq"),
        ("llama", "packed"),
    ],
)
def test_logits_match_a_plain_model_of_the_same_values(family: str, name: str, tmp_path: Path) -> None:
    path, model = make_tiny(family, tmp_path)
    quantize_files(path, model, SCHEMES[name], CONFIGS.get(name, {}))
    facts = QuantFacts("compressed-tensors", all_but(("lm_head",), SCHEMES[name]))
    quant = read_checkpoint(path).quant if name in CONFIGS else facts
    prompts = random_prompts(17, 10)
    actual = run_paged(load_tiny(path, quant=quant), prompts, [[9, 5], [1, 4], [7, 1]])
    for logits, ids in zip(actual, prompts, strict=True):
        close(logits, run_hf(model, ids), 1e-2)


@pytest.mark.parametrize(
    ("scheme", "inputs", "message"),
    [
        (replace(AWQ, bits=3), 128, "3 bits is not supported; 4 bits are"),
        (replace(GPTQ, bits=2), 128, "2 bits is not supported; 4 and 8 bits are"),
        (replace(GPTQ, group=48), 96, "groups of 48 inputs are not supported; -1, 32, 64, 128"),
        (replace(GPTQ, group=128), 192, "192 inputs are not whole groups of 128; groups of -1 or 32 or 64"),
        (replace(GPTQ, group=-1), 100, "packs 8 numbers into a word"),
    ],
)
def test_unsupported_configs_are_rejected_before_loading(scheme: Grouped, inputs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        linear_of(scheme, (16,), inputs)
