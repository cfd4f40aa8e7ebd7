"""Tests of matmuls with packed weights on a GPU against float64 values of the gguf package."""

import pytest
import torch
from packed import stored
from random_inputs import CUDA, DEVICE, DTYPE, random
from torch import Tensor

from quire.kernels.cpu.gguf import TYPES, unpack_reference
from quire.kernels.gguf_grid import GRID_KINDS
from quire.kernels.reference import moe as reference
from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.reference.ops import Reference
from quire.kernels.triton import gguf_launch
from quire.kernels.triton.gguf_launch import (
    GGUFRowsPlan,
    choose,
    form_of,
    gated,
    linear,
    mix,
    multiply,
    rows,
    unpack,
)
from quire.kernels.triton.gguf_layout import KINDS, Planes, pack
from quire.kernels.triton.gguf_rows import WholeRows
from quire.kernels.triton.gguf_tiles import takes
from quire.kernels.triton.matmul import TilesPlan

SMALL = TilesPlan(16, 16, 128, 2, 4, 2)
gpu = pytest.mark.gpu


def made(kind: str, num_rows: int, columns: int, parts: int = 1, seed: int = 0) -> tuple[Planes, Tensor]:
    """Return a weight and its values."""
    file = stored(kind, num_rows, columns, seed)
    planes = pack(file.chunk(parts), kind, DEVICE)
    if CUDA:
        torch.cuda.synchronize()  # kernels may read a weight before the previous kernel has ended
    return planes, unpack_reference(file, kind).to(DEVICE).double()


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == DTYPE and actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < 7e-3, error


def test_every_packed_type_of_the_cpu_is_supported_on_gpu() -> None:
    assert set(KINDS) == set(TYPES) - {"NVFP4"}  # it is dequantized when it is loaded on a GPU


@pytest.mark.parametrize("kind", KINDS)
def test_matmuls_of_every_type(kind: str) -> None:
    """Check for misplaced codes, scales of another unit, and out-of-bounds rows and columns."""
    planes, weight = made(kind, 13, 256 if KINDS[kind].stored_columns == 256 else 96, parts=2)
    x, bias = random(2, planes.columns + 8)[:, 8:], random(13)
    expected = x.double() @ weight.T
    one = WholeRows(2, 1) if takes(form_of(planes)) else GGUFRowsPlan(True, 1)
    close(multiply(x[:1], planes, bias, one), expected[:1] + bias.double())
    close(multiply(x, planes, bias, SMALL), expected + bias.double())


def test_matmul_into_a_slice_of_columns() -> None:
    planes, weight = made("Q4_0", 13, 64)
    x, bias, out = random(2, 64), random(13), random(2, 20)
    expected = x.double() @ weight.T
    before = out.clone()
    multiply(x, planes, bias, GGUFRowsPlan(False, 1), out=out[:, 3:16])
    close(out[:, 3:16], expected + bias.double())
    assert torch.equal(out[:, :3], before[:, :3]) and torch.equal(out[:, 16:], before[:, 16:])


@pytest.mark.parametrize("kind", KINDS)
def test_dequantization_of_every_type(kind: str) -> None:
    planes, weight = made(kind, 7, 256)
    close(unpack(planes, DTYPE, 4, 3), weight[4:])
    ids = torch.tensor([3, 0, 6], device=DEVICE)
    close(rows(ids, planes, DTYPE), weight[ids])
    assert rows(ids, planes, torch.float32).sub(weight[ids]).abs().max() < 1e-4 * weight.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_repacked_weight_is_no_larger_than_the_file(kind: str) -> None:
    planes, _ = made(kind, 64, 1024)
    form = KINDS[kind]
    size = 64 * 1024 // form.stored_columns * form.stored_bytes
    if kind in GRID_KINDS:  # indices into a grid are resolved to 4 bits for each value
        size = 64 * 1024 * 4.6 / 8
    assert planes.data.numel() < size * (1.06 if kind == "MXFP4" else 1.05)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("IQ4_XS", GGUFRowsPlan(False, 1)),
        ("Q6_K", WholeRows(2, 1)),
        ("Q6_K", SMALL),
        ("Q4_K", WholeRows(1, 1)),
        ("Q4_K", SMALL),
        ("Q8_0", SMALL),
    ],
    ids=str,
)
def test_fused_gate_and_up(kind: str, plan: GGUFRowsPlan | WholeRows | TilesPlan) -> None:
    planes, weight = made(kind, 16, 256)
    x = random(2, 256) / 16
    expected = Reference().gated((x.double() @ weight.T).to(DTYPE), "silu")
    close(multiply(x, planes, None, plan, "silu"), expected)


def test_many_rows_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_launch, "_SCRATCH_WEIGHTS", 12 * 64)
    planes, weight = made("Q5_1", 30, 64)
    x, bias = random(130, 64), random(30)
    close(linear(x, planes, bias), x.double() @ weight.T + bias.double())
    planes, weight = made("Q4_0", 24, 64)
    close(gated(x, planes), Reference().gated((x.double() @ weight.T).to(DTYPE), "silu"))
    assert not len(linear(x[:0], planes))


@pytest.mark.parametrize(
    ("plan", "kinds", "bias"),
    [
        (None, ("Q4_1", "Q8_0"), True),
        pytest.param(None, ("Q5_0", "IQ4_NL"), False, marks=pytest.mark.slow),
        (TilesPlan(16, 32, 64, 1, 4, 2), ("Q4_1", "Q8_0"), True),
        (SMALL, ("IQ4_NL", "Q5_1"), False),
    ],
    ids=str,
)
def test_packed_experts(
    plan: TilesPlan | None, kinds: tuple[str, str], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for another expert, the type of another part, and lost pairs."""
    monkeypatch.setattr(gguf_launch, "choose_experts", lambda *_, **more: plan)
    experts, hidden, inner, tokens = 3, 32, 32, 3
    up, up_weight = made(kinds[0], experts * 2 * inner, hidden)
    down, down_weight = made(kinds[1], experts * hidden, inner, seed=1)
    ids = torch.rand(tokens, experts, device=DEVICE).topk(2).indices.to(torch.int32)
    ids[0, 0], ids[1] = -1, -1  # experts on other ranks
    weights, x = torch.rand(tokens, 2, device=DEVICE), random(tokens, hidden) / 8
    biases = (random(experts, 2 * inner), random(experts, hidden)) if bias else ()
    full = (up_weight.view(experts, 2 * inner, -1), down_weight.view(experts, hidden, -1), *biases)
    expected = reference.mix(x.float(), ids, weights, ExpertWeights(*(item.float() for item in full)), "silu")
    close(mix(x, ids, weights, up, down, "silu", *biases), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q6_K"])
def test_dequantization_without_the_copy_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_launch, "has_room", lambda: False)
    planes, weight = made(kind, 13, 256)
    x = random(3, 256)
    close(linear(x, planes), x.double() @ weight.T)


@pytest.mark.parametrize("num", [1, 2, 17, 64, 128, 129])
def test_every_shape_has_a_plan_that_fits(num: int) -> None:
    for size_out, size_in in [(6144, 4096), (4096, 14336), (128256, 4096), (100, 96), (28672, 4096)]:
        for parts in (1, 2):
            plan = choose(num, size_out, size_in, parts)
            assert (plan is None) == (num > 128) and isinstance(plan, GGUFRowsPlan) == (num == 1)
            if isinstance(plan, TilesPlan):
                assert plan.num >= min(num, 128) and plan.splits in (1, 2, 4, 8) and plan.length % 128 == 0


@gpu
@pytest.mark.parametrize("num", [1, 2, 16, 33, 64, 128, 200])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "Q6_K", "IQ4_XS"])
def test_real_shapes(kind: str, num: int) -> None:
    for size_out, size_in in [(6144, 4096), (4096, 14336), (1024, 1024)]:
        planes, weight = made(kind, size_out, size_in)
        x = random(num, size_in) / size_in**0.5
        close(linear(x, planes), x.double() @ weight.T)
        close(gated(x, planes), Reference().gated((x.double() @ weight.T).to(DTYPE), "silu"))


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_packed_experts_of_real_shapes(kind: str, tokens: int) -> None:
    experts, hidden, inner = 16, 1024, 768
    up, up_weight = made(kind, experts * 2 * inner, hidden)
    down, down_weight = made(kind, experts * hidden, inner, seed=1)
    ids = torch.rand(tokens, experts, device=DEVICE).topk(4).indices.to(torch.int32)
    weights, x = torch.rand(tokens, 4, device=DEVICE), random(tokens, hidden) / 32
    full = ExpertWeights(
        up_weight.view(experts, -1, hidden).float(), down_weight.view(experts, -1, inner).float()
    )
    close(mix(x, ids, weights, up, down, "silu"), reference.mix(x.float(), ids, weights, full, "silu"))
