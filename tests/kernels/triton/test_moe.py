"""Tests of routing and experts against torch."""

import itertools

import pytest
import torch
from interpreter import more
from random_inputs import CUDA, DEVICE, DTYPE, random
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels.reference import moe as reference
from quire.kernels.reference.activations import ACTIVATIONS
from quire.kernels.reference.fp8 import E4M3, quantize_reference, quantize_weight
from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.triton import moe as kernels
from quire.kernels.triton.moe import (
    MoERowsPlan,
    MoETile,
    MoETilesPlan,
    Plan,
    choose,
    mix,
    mixed,
    most_tiles,
    plan_of,
    route,
    sort,
)

SMALL = MoETile(32, 32, 4, 2)
PLANS: list[Plan] = [
    MoERowsPlan(16, 32, 4, 4),
    MoETilesPlan(16, SMALL, MoETile(16, 64, 4, 3)),
    MoETilesPlan(64, MoETile(16, 32, 4, 3), SMALL),
]
ROUTINGS = [
    (12, Routing(3)),
    (128, Routing(8, renormalized=True)),
    (512, Routing(10, renormalized=True, scale=2.5)),
    (5, Routing(1, scoring="sigmoid")),
    (
        48,
        Routing(5, scoring="sigmoid", renormalized=True, scale=2.5, num_groups=6, top_groups=3, group_best=2),
    ),
    (160, Routing(6, scale=16.0, num_groups=8, top_groups=3)),
]
gpu = pytest.mark.gpu


def layer(
    experts: int, hidden: int, inner: int, *, biased: bool = False, dtype: torch.dtype = DTYPE
) -> ExpertWeights:
    return ExpertWeights(
        random(experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5,
        random(experts, hidden, inner, dtype=dtype) / inner**0.5,
        random(experts, 2 * inner, dtype=dtype) if biased else None,
        random(experts, hidden, dtype=dtype) if biased else None,
    )


def pairs(num: int, top: int, experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num, experts, device=DEVICE).topk(top).indices.to(torch.int32)
    weights = torch.rand(num, top, device=DEVICE)
    if CUDA:
        torch.cuda.synchronize()
    return ids, weights


def without_some(ids: Tensor) -> Tensor:
    """Mark some experts as remote, for some tokens all of them."""
    ids = ids.clone()
    ids[::2, 0], ids[1::3] = -1, -1
    return ids


def close(actual: Tensor, expected: Tensor, most: float = 8e-3) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < most, error


def expected_of(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, activation: str) -> Tensor:
    wide = ExpertWeights(*(expert if expert is None else expert.float() for expert in experts))
    return reference.mix(x.float(), ids, weights, wide, activation).to(x.dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "routing"), ROUTINGS)
def test_routes(experts: int, routing: Routing, biased: bool) -> None:
    logits, bias = random(7, experts + 3, dtype=torch.float32)[:, :experts], None
    if biased:
        bias = 0.1 * random(experts, dtype=torch.float32)
    ids, weights = route(logits, routing, bias)
    expected_ids, expected_weights = reference.route(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_nonfinite_logits_choose_existing_experts() -> None:
    """Check rows of padding, which may hold anything."""
    logits = torch.full((3, 12), torch.nan, device=DEVICE)
    logits[1], logits[2, 5] = torch.inf, torch.inf
    ids, _ = route(logits, Routing(4, renormalized=True))
    for row in ids.tolist():
        assert len(set(row)) == 4 and set(row) <= set(range(12))


@pytest.mark.parametrize("num", [1, 3, *more(19)])
def test_fused_router_matmul_and_routing(num: int) -> None:
    x, router, bias = random(num, 1112)[:, 8:] / 33, random(20, 1104), random(20)
    routing = Routing(3, scoring="sigmoid", renormalized=True)
    for router_bias, choice_bias in itertools.product([None, random(20)], [None, bias]):
        for _ in range(2):  # the counter is zero again
            ids, weights = choose(x, router, routing, choice_bias, router_bias)
            logits = x.double() @ router.double().T
            logits = logits if router_bias is None else logits + router_bias.double()
            expected_ids, expected_weights = reference.route(logits.to(DTYPE), routing, choice_bias)
            assert torch.equal(ids.sort().values, expected_ids.sort().values)
            close(weights.sort().values, expected_weights.sort().values, 2e-3)


@pytest.mark.parametrize(
    ("plan", "num", "biased"),
    [
        (PLANS[0], 3, True),
        (PLANS[1], 5, True),
        (PLANS[2], 40, False),
        *more((PLANS[0], 1, True), (PLANS[0], 1, False), (PLANS[0], 3, False)),
        *more((PLANS[1], 5, False), (PLANS[2], 40, True)),
    ],
    ids=str,
)
def test_experts_of_odd_sizes(plan: Plan, num: int, biased: bool) -> None:
    x, experts = random(num, 80)[:, 8:], layer(5, 72, 40, biased=biased)
    ids, weights = pairs(num, 3, 5)
    for chosen in (ids, without_some(ids)):
        expected = expected_of(x, chosen, weights, experts, "silu")
        close(mixed(x, chosen, weights, experts, "silu", plan), expected)


def in_torch(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    narrow, scale = quantize_reference(x, grouped=grouped)
    return narrow, scale.t().contiguous().t()


def narrow_layer(experts: int, hidden: int, inner: int, *, blocked: bool) -> ExpertWeights:
    gate_up, down = (quantize_weight(weight.float()) for weight in layer(experts, hidden, inner)[:2])
    scales = [gate_up.scale, down.scale]
    if blocked:
        shapes = (
            (experts, -(-2 * inner // 128), -(-hidden // 128)),
            (experts, -(-hidden // 128), -(-inner // 128)),
        )
        scales = [torch.rand(*shape, device=DEVICE) / 2000 + 1e-4 for shape in shapes]
    made = ExpertWeights(gate_up.data, down.data, gate_up_scale=scales[0], down_scale=scales[1])
    if CUDA:
        torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("height", [0, 16, *more(64)])
def test_experts_in_e4m3(height: int, blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with a tolerance of some percent, since tile kernels quantize x to e4m3 too."""
    if not CUDA:  # Triton's interpreter rounds to e4m3 wrongly
        monkeypatch.setattr(kernels, "quantize", in_torch)
    tiles = MoETile(32, 128, 4, 2), MoETile(64, 128, 4, 2)
    plan: Plan = MoETilesPlan(height, *tiles) if height else MoERowsPlan(16, 16, 4, 4)
    x, experts = random(3, 144), narrow_layer(4, 144, 128, blocked=blocked)
    ids, weights = pairs(3, 2, 4)
    ids[1, 0] = -1
    expected = reference.mix(x.float(), ids, weights, experts, "silu").to(DTYPE)
    close(mixed(x, ids, weights, experts, "silu", plan), expected, 0.06 if height else 8e-3)


@gpu
@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("num", [1, 2, 8, 33, 256, 700, 2048])
def test_real_shapes_in_e4m3(num: int, blocked: bool) -> None:
    x, weights_of = random(num, 2048), narrow_layer(128, 2048, 768, blocked=blocked)
    ids, weights = pairs(num, 8, 128)
    actual = mix(x, ids, weights, weights_of, "silu")
    close(actual, reference.mix(x, ids, weights, weights_of, "silu"), 0.06)
    assert torch.equal(mix(x, ids, weights, weights_of, "silu"), actual)


@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu", "silu<0.3"])
def test_every_activation(activation: str, plan: Plan) -> None:
    x, experts = 4 * random(2, 32), layer(4, 32, 32)
    ids, weights = pairs(2, 2, 4)
    expected = expected_of(x, ids, weights, experts, activation)
    close(mixed(x, ids, weights, experts, activation, plan), expected)


@pytest.mark.parametrize(
    ("inner", "dtype", "num"),
    [
        (36, DTYPE, 3),
        (64, torch.float32, 3),
        (64, DTYPE, 30),
        *more((36, DTYPE, 1), (36, DTYPE, 30), (64, torch.float32, 1), (64, torch.float32, 30)),
        *more((64, DTYPE, 1), (64, DTYPE, 3)),
    ],
)
def test_selected_kernel_computes_experts(inner: int, dtype: torch.dtype, num: int) -> None:
    x, experts = random(num, 32, dtype=dtype), layer(6, 32, inner, dtype=dtype)
    ids, weights = pairs(num, 2, 6)
    actual = mix(x, ids, weights, experts, "silu")
    close(actual, expected_of(x, ids, weights, experts, "silu"), 1e-5 if dtype == torch.float32 else 8e-3)
    assert torch.equal(mix(x, ids, weights, experts, "silu"), actual)


def test_single_busy_expert_and_no_tokens() -> None:
    x, experts = random(20, 32), layer(8, 32, 32)
    ids, weights = torch.full((20, 1), 7, dtype=torch.int32, device=DEVICE), pairs(20, 1, 8)[1]
    for plan in PLANS:
        close(mixed(x, ids, weights, experts, "silu", plan), expected_of(x, ids, weights, experts, "silu"))
    assert mix(x[:0], ids[:0], weights[:0], experts, "silu").shape == (0, 32)


@pytest.mark.parametrize(("num", "top", "experts"), [(1, 1, 1), (11, 3, 7), (300, 4, 20), (6000, 4, 5)])
def test_sorting(num: int, top: int, experts: int) -> None:
    """Check sizes up to six chunks, two of them per program."""
    ids, _ = pairs(num, top, experts)
    ids = ids if num == 1 else without_some(ids)
    count = int((ids >= 0).sum())
    order, work = sort(ids, experts, 16, ahead=False)
    order = order[:count]
    assert torch.equal(order.long(), ids.flatten().sort(stable=True).indices[ids.numel() - count :])
    in_order, most = ids.flatten()[order.long()].tolist(), most_tiles(ids.numel(), experts, 16)
    num_tiles = int(work[0])
    assert num_tiles <= most
    covered = 0
    for expert, start, end, _ in work[4:].view(-1, 4)[:num_tiles].tolist():
        assert start == covered and start < end <= start + 16
        assert set(in_order[start:end]) == {expert}
        covered = end
    assert covered == count


def test_upper_bound_of_tiles() -> None:
    assert [most_tiles(*sizes) for sizes in [(8, 128, 16), (128, 128, 16), (160, 128, 16)]] == [8, 128, 130]


@gpu
@pytest.mark.parametrize("num", [1, 2, 3, 8, 33, 128, 256, 700, 2048])
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "inner", "activation"),
    [(128, 8, 2048, 768, "silu"), (32, 4, 2880, 2880, "clamped_swiglu"), (8, 2, 4096, 14336, "silu")],
)
def test_real_shapes(experts: int, top: int, hidden: int, inner: int, activation: str, num: int) -> None:
    x, weights_of = random(num, hidden), layer(experts, hidden, inner, biased=activation != "silu")
    ids, weights = pairs(num, top, experts)
    actual = mix(x, ids, weights, weights_of, activation)
    close(actual, reference.mix(x, ids, weights, weights_of, activation))
    assert torch.equal(mix(x, ids, weights, weights_of, activation), actual)


def test_every_shape_has_a_plan_that_fits() -> None:
    nums = 1, 2, 3, 5, 8, 40, 130, 256, 2048, 16384
    layers = (8, 128, 2048, 768), (4, 32, 2880, 2880), (16, 512, 100, 90)
    dtypes = torch.bfloat16, torch.float32, E4M3
    for case in itertools.product(nums, layers, dtypes, (False, True)):
        num, (top, experts, hidden, inner), dtype, blocked = case
        plan = plan_of(num * top, top, experts, hidden, inner, dtype, blocked=blocked)
        if isinstance(plan, MoERowsPlan):
            assert dtype != E4M3 or 128 % plan.up == 128 % plan.down == 0, case
        else:
            assert hidden % 8 == inner % 8 == 0, case
            assert dtype != E4M3 or not blocked or plan.up.rows <= plan.up.length == 128, case
            held = max(plan.up.stages * plan.up.length * (plan.num + 2 * plan.up.rows),
                       plan.down.stages * plan.down.length * (plan.num + plan.down.rows))  # fmt: skip
            assert held * dtype.itemsize <= 227 * 1024, case
