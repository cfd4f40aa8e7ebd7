"""Tests of matmuls with group-quantized weights against torch in float64."""

import itertools
from typing import Any

import pytest
import torch
from interpreter import more
from random_inputs import CUDA, DEVICE, DTYPE, random
from torch import Tensor

from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.reference.moe import mix as mix_reference
from quire.kernels.reference.ops import Reference
from quire.kernels.triton.gguf_plans import choose
from quire.kernels.triton.gguf_rows import WholeRows
from quire.kernels.triton.int4 import GroupedWeight, gated, linear, multiply, offset, pack, unpack
from quire.kernels.triton.int4_moe import mix, stack
from quire.kernels.triton.int4_moe import pack as pack_expert
from quire.kernels.triton.matmul import TilesPlan

PLANS = [
    WholeRows(2, 1),
    TilesPlan(16, 32, 64, 1, 4, 3),
    TilesPlan(16, 16, 32, 3, 2, 3),
    TilesPlan(64, 64, 128, 1, 4, 3),
]
SHAPES = [(4, 64, 192), (4, 32, 96), (8, -1, 80)]
BRANCHES = [
    (PLANS[0], *SHAPES[1]),
    (PLANS[0], *SHAPES[2]),
    (PLANS[1], *SHAPES[0]),
    (PLANS[1], *SHAPES[2]),
    (PLANS[2], *SHAPES[1]),
]
"""Row and tile kernels, each with codes of both sizes, with several groups and one; split sums."""
OTHERS = [(plan, *shape) for plan, shape in itertools.product(PLANS, SHAPES)]
GATED = 1.2e-2
"""Limit for gated products: gate and up are rounded, and the row kernels do not round the weights. In
bfloat16 that is up to 1e-2 of the norm of 16 outputs."""
gpu = pytest.mark.gpu


def unpack_in_torch(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [size_out, size_in], computed in torch."""
    words, heads, bits, group, size_in = weight
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    parts = (words[..., None] >> shifts & (1 << bits) - 1).view(len(words), -1, 4, 2, 2, 16 // bits // 2)
    values = parts.permute(0, 1, 5, 4, 2, 3).reshape(len(words), -1)[:, :size_in]
    scale = (heads >> 16).to(torch.int16).view(dtype).float().repeat_interleave(group, 0)[:size_in].t()
    zero = heads.to(torch.int16).view(dtype).float().repeat_interleave(group, 0)[:size_in].t()
    return ((values - (zero - offset(bits, dtype))) * scale).to(dtype)


def weight_of(
    outputs: int, inputs: int, bits: int, group: int, dtype: torch.dtype = DTYPE, pack: Any = pack
) -> tuple[Any, Tensor]:
    """Return a random weight and its values."""
    groups = 1 if group < 0 else inputs // group
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(outputs, groups, device=DEVICE) + 0.5) / (1 << bits) / inputs**0.5
    zeros = torch.randint(0, (1 << bits) + 1, (outputs, groups), device=DEVICE)
    weight = pack(codes, scales, zeros, bits=bits, dtype=dtype)
    wide = (codes - zeros.repeat_interleave(inputs // groups, 1)) * scales.to(dtype).repeat_interleave(
        inputs // groups, 1
    )
    if CUDA:
        torch.cuda.synchronize()
    return weight, wide.to(dtype)


def close(actual: Tensor, expected: Tensor, limit: float = 5e-3) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < limit, error


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize(("bits", "group", "inputs"), [*SHAPES, (4, 128, 512), (4, 32, 128), (8, 64, 576)])
def test_packing_round_trip(bits: int, group: int, inputs: int) -> None:
    weight, expected = weight_of(22, inputs, bits, group)
    assert torch.equal(unpack_in_torch(weight, DTYPE), expected)
    close(unpack(weight, DTYPE), expected)


@pytest.mark.parametrize(
    ("plan", "bits", "group", "inputs"),
    [*BRANCHES, *more(*(case for case in OTHERS if case not in BRANCHES))],
    ids=str,
)
def test_matmuls_of_odd_sizes(plan: WholeRows | TilesPlan, bits: int, group: int, inputs: int) -> None:
    num = 2 if isinstance(plan, WholeRows) else 19
    (weight, plain), x, bias = weight_of(22, inputs, bits, group), random(num, inputs + 8)[:, 8:], random(22)
    close(multiply(x, weight, bias, plan), product(x, plain) + bias.double())
    expected = Reference().gated(product(x, plain), "silu")
    close(multiply(x, weight, None, plan, gated=True), expected, GATED)


@pytest.mark.parametrize("num", [1, 40])
def test_selected_kernel_multiplies(num: int) -> None:
    (weight, plain), x = weight_of(32, 128, 4, 64), random(num, 128)
    close(linear(x, weight), product(x, plain))
    close(gated(x, weight), Reference().gated(product(x, plain), "silu"), GATED)


@pytest.mark.parametrize(("bits", "activation"), [(4, "silu"), (8, "relu")])
def test_experts(bits: int, activation: str) -> None:
    num, experts, hidden, inner = 9, 3, 96, 64
    made = [
        [weight_of(*size, bits, 32, pack=pack_expert) for _ in range(experts)]
        for size in ((2 * inner, hidden), (hidden, inner))
    ]
    packed = [stack([weight for weight, _ in of]) for of in made]
    plain = [torch.stack([wide for _, wide in of]) for of in made]
    biases = random(experts, 2 * inner), random(experts, hidden)
    ids = torch.rand(num, experts, device=DEVICE).topk(2).indices.to(torch.int32)
    ids[0, 0] = -1  # an expert on another rank
    x, weights = random(num, hidden), torch.rand(num, 2, device=DEVICE)
    actual = mix(x, ids, weights, packed[0], packed[1], biases, activation)
    wide = ExpertWeights(plain[0].float(), plain[1].float(), *(bias.float() for bias in biases))
    close(actual, mix_reference(x.float(), ids, weights, wide, activation))


def test_every_shape_has_a_plan_that_fits() -> None:
    nums = 1, 2, 16, 17, 64, 100, 128, 256, 300, 512
    sizes = (6144, 4096), (4096, 14336), (28672, 4096), (576, 1536), (100, 96)
    for case in itertools.product(nums, sizes, (1, 2), (16, 32)):
        num, (size_out, size_in), parts, unit = case
        plan = choose(num, size_out, size_in, parts, unit)
        assert plan is not None or parts == 2 and num > 64, case
        assert isinstance(plan, WholeRows) == (num == 1), case
        if isinstance(plan, TilesPlan):
            held = plan.stages * plan.length * (2 * plan.num + parts * plan.rows * 16 // unit)
            assert held < 225 * 1024 and plan.splits * 256 <= max(size_in, 256), case
            assert plan.length % unit == 0 and 256 % plan.length == 0, case


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num", [1, 8, 30, 64, 128, 256, 600])
@pytest.mark.parametrize(("size_out", "size_in"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_real_shapes(size_out: int, size_in: int, num: int, bits: int, dtype: torch.dtype) -> None:
    (weight, plain), x = weight_of(size_out, size_in, bits, 128, dtype), random(num, size_in).to(dtype)
    close(linear(x, weight), product(x, plain))
    close(gated(x, weight), Reference().gated(product(x, plain).to(dtype), "silu"))
