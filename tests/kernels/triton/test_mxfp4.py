"""Tests of MXFP4 experts against torch with dequantized weights."""

import pytest
import torch
from torch import Tensor

from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.reference.moe import mix as mix_plain
from quire.kernels.reference.mxfp4 import unpack
from quire.kernels.triton.moe import MoERowsPlan, MoETile, MoETilesPlan, Plan
from quire.kernels.triton.mxfp4 import Mxfp4Weights, mix, mixed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter has no bfloat16
PLANS: list[Plan] = [
    MoERowsPlan(16, 4, 4, 4),
    MoETilesPlan(16, MoETile(32, 64, 4, 2), MoETile(16, 128, 4, 2)),
    MoETilesPlan(64, MoETile(16, 32, 4, 2), MoETile(32, 64, 4, 2)),
]


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    made = torch.randn(*shape, device=DEVICE).to(dtype)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # kernels may read before the previous kernel has ended
    return made


def pairs(num: int, top: int, experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num, experts, device=DEVICE).topk(top).indices.to(torch.int32)
    return ids, random(num, top, dtype=torch.float32).abs()


def close(
    actual: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, activation: str
) -> None:
    wide = ExpertWeights(*(expert if expert is None else expert.float() for expert in experts))
    expected = mix_plain(x.float(), ids, weights, wide, activation)
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert actual.dtype == x.dtype and error < (1e-4 if x.dtype == torch.float32 else 8e-3), error


def layer(experts: int, hidden: int, inner: int) -> tuple[Mxfp4Weights, ExpertWeights]:
    """Return a packed layer and its dequantized weights."""

    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        shape = (experts, rows, columns // 32)
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=DEVICE)
        return codes, torch.randint(121, 125, shape, dtype=torch.uint8, device=DEVICE)

    up, down = packed(2 * inner, hidden), packed(hidden, inner)
    biases = random(experts, 2 * inner), random(experts, hidden)
    return Mxfp4Weights(*up, *down, *biases), ExpertWeights(unpack(*up), unpack(*down), *biases)


@pytest.mark.parametrize(
    ("plan", "num"),
    [
        (PLANS[0], 1),
        pytest.param(PLANS[0], 3, marks=pytest.mark.slow),
        (PLANS[1], 5),
        pytest.param(PLANS[2], 40, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [DTYPE, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_experts_of_odd_sizes(plan: Plan, num: int, dtype: torch.dtype) -> None:
    """Check for swapped halves or scales of a block, rows beyond the last, and misplaced biases."""
    torch.manual_seed(0)
    x, (packed, plain) = random(num, 104, dtype=dtype)[:, 8:], layer(5, 96, 160)
    ids, weights = pairs(num, 3, 5)
    ids[::2, 0], ids[1::3] = -1, -1  # experts on other ranks; for some tokens all of them
    actual = mixed(x, ids, weights, packed, "clamped_swiglu", plan)
    close(actual, x, ids, weights, plain, "clamped_swiglu")


def test_without_biases_and_without_tokens() -> None:
    torch.manual_seed(1)
    packed, plain = layer(4, 64, 32)
    packed, plain = packed._replace(gate_up_bias=None, down_bias=None), ExpertWeights(*plain[:2])
    for num in (1, 6):
        x, (ids, weights) = random(num, 64), pairs(num, 2, 4)
        close(mix(x, ids, weights, packed, "silu"), x, ids, weights, plain, "silu")
    assert mix(x[:0], ids[:0], weights[:0], packed, "silu").shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 4, 32, 256, 2048])
def test_real_shapes(num: int) -> None:
    x, (packed, plain) = random(num, 2880), layer(32, 2880, 2880)
    ids, weights = pairs(num, 4, 32)
    actual = mix(x, ids, weights, packed, "clamped_swiglu")
    close(actual, x, ids, weights, plain, "clamped_swiglu")
    assert torch.equal(mix(x, ids, weights, packed, "clamped_swiglu"), actual)
